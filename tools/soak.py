"""Answer random prompts for a long time in one process and see whether it grows.

    python tools/soak.py --nvme DIR --minutes 30 --out tools/results/soak.json
    python tools/soak.py --nvme DIR --model MODEL_DIR --dram 700MiB --minutes 5

Batches of random sizes, prompt lengths, samplings and stop strings go through the Python API under
a small budget; a few prompts are wrong, now and then a stream is dropped in the middle, and the
engine is planned and opened again. After each batch resident memory, descriptors and threads are
noted.
Exit code 1: memory drifts by more than --max-drift after the warm-up, or descriptors or threads
were left behind.
"""

import argparse
import json
import math
import random
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any

from bench_common import end_cleanly_on_sigterm, write_results

from zeroinfer import LLM, SamplingParams
from zeroinfer.errors import ZeroInferError
from zeroinfer.llm import Prompt
from zeroinfer.memory import measure_base_bytes, process_rss_bytes
from zeroinfer.units import MIB, format_bytes

__all__ = ["Sample", "Verdict", "judge", "make_batch"]

MAX_BATCH = 8
MAX_PROMPT_TOKENS = 64
MAX_NEW_TOKENS = 24
WARM_UP_SHARE = 0.2
# A quarter of what follows the warm-up is compared with another: single samples scatter.
COMPARED_SHARE = 0.25
MIN_COMPARED = 3
WORDS = ("sea", "night", "river", "seven", "because", "green", "\u00e9t\u00e9", "\U0001f600", "why")


@dataclass(frozen=True, kw_only=True, slots=True)
class Sample:
    """What the process held after one batch."""

    at_s: float
    rss_bytes: int
    """Without free heap, whose amount follows the last batch: it goes back before the look."""
    untrimmed_rss_bytes: int
    num_descriptors: int
    num_threads: int

    @classmethod
    def take(cls, start_s: float) -> "Sample":
        return cls(
            at_s=time.monotonic() - start_s,
            untrimmed_rss_bytes=process_rss_bytes(),
            rss_bytes=measure_base_bytes(),
            num_descriptors=len(list(Path("/proc/self/fd").iterdir())),
            num_threads=len(list(Path("/proc/self/task").iterdir())),
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class Verdict:
    """The end compared with the time after the warm-up."""

    early_rss_bytes: float
    late_rss_bytes: float
    num_new_descriptors: int
    num_new_threads: int
    max_drift: float

    @property
    def drift(self) -> float:
        """Growth as a share; below 0 when memory went down."""
        return self.late_rss_bytes / self.early_rss_bytes - 1

    @property
    def faults(self) -> list[str]:
        """What grew, in words."""
        faults = []
        if self.drift > self.max_drift:
            faults.append(
                f"resident memory went from {format_bytes(int(self.early_rss_bytes))} to "
                f"{format_bytes(int(self.late_rss_bytes))}: {self.drift:+.2%}, need at most "
                f"{self.max_drift:+.2%}"
            )
        if self.num_new_descriptors > 0:
            faults.append(f"{self.num_new_descriptors} descriptors were left open")
        if self.num_new_threads > 0:
            faults.append(f"{self.num_new_threads} threads were left running")
        return faults


def judge(samples: Sequence[Sample], *, max_drift: float) -> Verdict:
    """Compare the last quarter of the samples with the first one after the warm-up.

    Raises:
        SystemExit: there are too few samples to compare.
    """
    warm_s = WARM_UP_SHARE * samples[-1].at_s if samples else 0.0
    warm = [sample for sample in samples if sample.at_s >= warm_s]
    count = int(COMPARED_SHARE * len(warm))
    if count < MIN_COMPARED:
        need = int(MIN_COMPARED / COMPARED_SHARE)
        raise SystemExit(f"{len(warm)} batches after the warm-up, need {need}; give more --minutes")
    early, late = warm[:count], warm[-count:]
    return Verdict(
        early_rss_bytes=median(sample.rss_bytes for sample in early),
        late_rss_bytes=median(sample.rss_bytes for sample in late),
        # The lowest of each: a reader that is just closing is no leak.
        num_new_descriptors=_growth([s.num_descriptors for s in early + late], count),
        num_new_threads=_growth([s.num_threads for s in early + late], count),
        max_drift=max_drift,
    )


def _growth(counts: list[int], num_early: int) -> int:
    return min(counts[num_early:]) - max(counts[:num_early])


def make_batch(
    chance: random.Random, *, vocab_size: int, has_tokenizer: bool
) -> tuple[list[Prompt], list[SamplingParams]]:
    """Draw prompts of every kind, one in twenty of them wrong, and their samplings."""
    count = chance.randint(1, MAX_BATCH)
    prompts = [_prompt(chance, vocab_size, has_tokenizer) for _ in range(count)]
    return prompts, [_sampling(chance, has_tokenizer) for _ in range(count)]


def _prompt(chance: random.Random, vocab_size: int, has_tokenizer: bool) -> Prompt:
    kind = chance.random()
    if kind < 0.05:
        return chance.choice(["", [], [vocab_size], [5, "x"]])
    if has_tokenizer and kind < 0.6:
        text = " ".join(chance.choices(WORDS, k=chance.randint(1, MAX_PROMPT_TOKENS // 8)))
        return text if kind < 0.35 else [{"role": "user", "content": text}]
    return chance.choices(range(vocab_size), k=chance.randint(1, MAX_PROMPT_TOKENS))


def _sampling(chance: random.Random, has_tokenizer: bool) -> SamplingParams:
    return SamplingParams(
        max_tokens=chance.randint(1, MAX_NEW_TOKENS),
        temperature=chance.choice([0.0, 0.0, 0.7, 1.5]),
        top_k=chance.choice([0, 0, 1, 40]),
        top_p=chance.choice([1.0, 1.0, 0.5]),
        seed=chance.randrange(2**31),
        stop=chance.choice([(), (), ("e",), (". ", "night")]) if has_tokenizer else (),
        ignore_eos=chance.random() < 0.5,
    )


@dataclass(slots=True)
class Soak:
    """A running soak: one LLM, random batches, a sample after each."""

    llm: LLM
    chance: random.Random
    vocab_size: int
    has_tokenizer: bool
    num_batches: int = 0
    num_dropped: int = 0
    num_answers: int = 0
    num_errors: int = 0
    num_tokens: int = 0

    def warm_up(self) -> None:
        """Have the engine planned for the largest batch, so that every later one fits."""
        prompts = [[1] * MAX_PROMPT_TOKENS] * MAX_BATCH
        sampling = SamplingParams(max_tokens=MAX_NEW_TOKENS, ignore_eos=True)
        self.llm.generate(prompts, sampling)

    def run_batch(self) -> None:
        prompts, samplings = make_batch(
            self.chance, vocab_size=self.vocab_size, has_tokenizer=self.has_tokenizer
        )
        stream = self.llm.stream(prompts, samplings)
        for answer in stream:
            self.num_answers += 1
            self.num_errors += answer.error is not None
            self.num_tokens += len(answer.token_ids)
        self.num_batches += 1

    def drop_batch(self) -> None:
        """Leave a stream after its first answer, then open the engine again as at the start."""
        sampling = [SamplingParams(max_tokens=count, ignore_eos=True) for count in (1, 20)]
        stream = self.llm.stream([[1], [2]], sampling)
        next(stream)
        stream.close()
        self.num_dropped += 1
        self.warm_up()


def run_soak(soak: Soak, *, minutes: float, num_batches: float, drop_every: int) -> list[Sample]:
    """Run batches until time or number is reached; returns what was held after each."""
    start_s = time.monotonic()
    said_s = start_s
    samples: list[Sample] = []
    soak.warm_up()
    if drop_every:
        # The first opening again takes more than the first opening; later ones do not.
        soak.drop_batch()
    while soak.num_batches < num_batches and time.monotonic() - start_s < 60 * minutes:
        soak.run_batch()
        if drop_every and soak.num_batches % drop_every == 0:
            soak.drop_batch()
        samples.append(Sample.take(start_s))
        if time.monotonic() - said_s > 10:
            said_s = time.monotonic()
            print(f"{_say(samples[-1])}, {soak.num_batches} batches", file=sys.stderr)
    return samples


def _say(sample: Sample) -> str:
    return (
        f"{sample.at_s:.0f} s: {sample.rss_bytes / MIB:.1f} MiB, {sample.num_descriptors} "
        f"descriptors, {sample.num_threads} threads"
    )


def share(text: str) -> float:
    value = float(text)
    if not 0 <= value < 1:
        raise argparse.ArgumentTypeError(f"got {text}, need a share from 0 up to 1")
    return value


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Look for growth over many random batches.")
    parser.add_argument("--model", default="", help="checkpoint folder; default: the embedded one")
    parser.add_argument("--nvme", type=Path, required=True, help="folder for stores and profiles")
    parser.add_argument("--dram", default="700MiB", help="budget, small on purpose (700MiB)")
    parser.add_argument("--minutes", type=float, default=30.0)
    parser.add_argument(
        "--batches", type=int, default=math.inf, help="end after this many, if that is sooner"
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--drop-every",
        type=int,
        default=50,
        metavar="N",
        help="drop a stream in the middle after every N batches; 0 never (50)",
    )
    parser.add_argument(
        "--max-drift",
        type=share,
        default=0.01,
        help="largest growth of resident memory, as a share (0.01)",
    )
    parser.add_argument("--out", type=Path, help="JSON file for samples and verdict")
    return parser.parse_args()


def _result(soak: Soak, samples: Sequence[Sample], verdict: Verdict) -> dict[str, Any]:
    counts = ("num_batches", "num_dropped", "num_answers", "num_errors", "num_tokens")
    return {
        **{name: getattr(soak, name) for name in counts},
        "verdict": {**asdict(verdict), "drift": verdict.drift, "faults": verdict.faults},
        "report": soak.llm.report()["totals"],
        "samples": [list(asdict(sample).values()) for sample in samples],
        "sample_fields": list(Sample.__dataclass_fields__),
    }


def main() -> int:
    arguments = parse_arguments()
    end_cleanly_on_sigterm()
    try:
        with LLM(arguments.model, nvme=arguments.nvme, dram=arguments.dram) as llm:
            has_tokenizer = llm.generate(["a"], SamplingParams(max_tokens=1))[0].error is None
            soak = Soak(
                llm=llm,
                chance=random.Random(arguments.seed),
                vocab_size=llm.model.checkpoint.config["vocab_size"],
                has_tokenizer=has_tokenizer,
            )
            samples = run_soak(
                soak,
                minutes=arguments.minutes,
                num_batches=arguments.batches,
                drop_every=arguments.drop_every,
            )
            verdict = judge(samples, max_drift=arguments.max_drift)
            result = _result(soak, samples, verdict)
    except ZeroInferError as error:
        print(error, file=sys.stderr)
        return error.exit_code
    if arguments.out:
        folders = {"NVME_DIR": arguments.nvme}
        write_results(arguments.out, "soak", arguments.nvme, result, folders=folders)
    print(json.dumps({**result["verdict"], "num_batches": soak.num_batches}))
    for fault in verdict.faults:
        print(fault, file=sys.stderr)
    return 1 if verdict.faults else 0


if __name__ == "__main__":
    sys.exit(main())
