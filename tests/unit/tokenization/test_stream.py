import itertools

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.helpers.scripted_model import SCRIPT, script_ids
from tests.helpers.tokenizers import (
    EOT_ID,
    byte_alphabet,
    byte_ids,
    gpt2_like_tok,
    metaspace_tok,
    s_tok,
    write_tokenizer,
)
from zeroinfer.errors import RequestError
from zeroinfer.tokenization import TextStream, Tokenizer

EMOJI = "\N{GRINNING FACE}"
MARK = "\ufffd"
STRADDLING = [(b"\x80", b"\xf0"), (b"\xa9", b"\xc3")]
MAKERS = {
    "s_tok": s_tok,
    "gpt2": gpt2_like_tok,
    "metaspace": metaspace_tok,
    "straddling": lambda: s_tok(merges=STRADDLING),
}
relaxed = settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))


@pytest.fixture(scope="module")
def tokenizers(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tokenizers")
    return {
        name: Tokenizer.open(write_tokenizer(folder / name, tokenizer=make()))
        for name, make in MAKERS.items()
    }


def run(stream, ids):
    """Push until a stop; return the chunks, that of finish last."""
    chunks = []
    for token_id in ids:
        chunks.append(stream.push(token_id))
        if stream.is_stopped:
            break
    return [*chunks, stream.finish()]


def test_characters_of_several_tokens_come_whole(tokenizers):
    """Source: huggingface/text-generation-inference#131."""
    stream = TextStream(tokenizers["s_tok"])
    chunks = run(stream, script_ids())
    assert chunks == [">", "a", "b", "", "", "", EMOJI, "c", "d", "", "\u00e9", "!", "", ""]
    assert stream.text == SCRIPT


@pytest.mark.parametrize(
    ("stop", "text"),
    [
        (["b" + EMOJI], ">a"),
        (["ab"], ">"),
        ([SCRIPT], ""),
        (["d"], f">ab{EMOJI}c"),
        (["absent"], SCRIPT),
        (["absent", "d", "b" + EMOJI], ">a"),
        ([EMOJI + "x", "cd"], f">ab{EMOJI}"),
    ],
)
def test_text_is_cut_exactly_before_the_stop(tokenizers, stop, text):
    """Source: huggingface/text-generation-inference#1039."""
    stream = TextStream(tokenizers["s_tok"], stop)
    chunks = run(stream, script_ids())
    assert stream.text == "".join(chunks) == text
    assert stream.is_stopped == (stop != ["absent"])


@pytest.mark.parametrize("stop", ["c", "d", "cd", "b" + EMOJI + "c"])
def test_a_stop_inside_a_token_cuts_the_token(tmp_path, stop):
    """Source: huggingface/text-generation-inference#1039."""
    merged = Tokenizer.open(write_tokenizer(tmp_path, tokenizer=s_tok(merges=[(b"c", b"d")])))
    ids = merged.encode(SCRIPT)
    assert 260 in ids
    stream = TextStream(merged, [stop])
    run(stream, ids)
    assert stream.text == SCRIPT[: SCRIPT.index(stop)]


def test_text_that_may_begin_a_stop_is_held_back(tokenizers):
    stream = TextStream(tokenizers["s_tok"], ["aab!"])
    chunks = run(stream, byte_ids("xaaabaaab"))
    assert chunks == ["x", "", "", "a", "", "aab", "", "a", "", "aab"]
    assert not stream.is_stopped


def test_the_stop_that_is_complete_first_counts(tokenizers):
    stream = TextStream(tokenizers["s_tok"], ["abcd", "bc"])
    run(stream, byte_ids("abcd"))
    assert stream.text == "a"


def test_the_stop_that_is_complete_first_counts_inside_one_token(tmp_path):
    merges = [(b"a", b"b"), (b"c", b"d"), (b"ab", b"cd")]
    merged = Tokenizer.open(write_tokenizer(tmp_path, tokenizer=s_tok(merges=merges)))
    stream = TextStream(merged, ["abcd", "bc"])
    run(stream, [262])
    assert stream.text == "a"


def test_of_stops_that_end_together_the_longer_counts(tokenizers):
    stream = TextStream(tokenizers["s_tok"], ["c", "bc"])
    run(stream, byte_ids("abcd"))
    assert stream.text == "a"


def test_nothing_follows_a_stop(tokenizers):
    stream = TextStream(tokenizers["s_tok"], ["b"])
    assert run(stream, byte_ids("ab")) == ["a", "", ""]
    assert stream.push(byte_ids("c")[0]) == stream.finish() == ""
    assert stream.text == "a"


def test_an_unfinished_character_shows_as_a_mark_at_the_end(tokenizers):
    stream = TextStream(tokenizers["s_tok"])
    assert run(stream, byte_ids("a" + EMOJI)[:-1]) == ["a", "", "", "", MARK]
    assert stream.finish() == ""


def test_a_stop_that_ends_with_a_mark_is_found_at_the_end(tokenizers):
    stream = TextStream(tokenizers["s_tok"], ["a" + MARK])
    run(stream, byte_ids("xa" + EMOJI)[:-1])
    assert stream.is_stopped
    assert stream.text == "x"


def test_ids_without_text_are_passed_over(tokenizers):
    emoji = byte_ids(EMOJI)
    ids = [EOT_ID, 263, *emoji[:2], EOT_ID, *emoji[2:]]
    assert run(TextStream(tokenizers["s_tok"]), ids) == ["", "", "", "", "", "", EMOJI, ""]


def test_an_empty_stop_is_refused(tokenizers):
    with pytest.raises(RequestError, match="stop holds an empty string"):
        TextStream(tokenizers["s_tok"], ["a", ""])


@pytest.mark.parametrize("num_before", range(len(script_ids())))
def test_a_resumed_stream_goes_on_as_if_undisturbed(tokenizers, num_before):
    ids = script_ids()
    whole, resumed = (
        TextStream(tokenizers["s_tok"], [EMOJI + "c!"], initial_ids=ids[:count])
        for count in (0, num_before)
    )
    chunks = run(whole, ids)
    assert run(resumed, ids[num_before:]) == chunks[num_before:]
    assert resumed.text == whole.text == SCRIPT


def test_a_stop_may_lie_in_the_initial_ids(tokenizers):
    stream = TextStream(tokenizers["s_tok"], ["b"], initial_ids=byte_ids("abc"))
    assert stream.is_stopped
    assert stream.text == "a"


def test_a_leading_space_is_dropped_once_and_never_later(tokenizers):
    tokenizer = tokenizers["metaspace"]
    text = " hello world  hello . the\u00e9 hello"
    stream = TextStream(tokenizer)
    run(stream, tokenizer.encode(text))
    assert stream.text == text


def test_bytes_that_never_become_a_character_leave_their_neighbours_whole(tokenizers):
    tokenizer = tokenizers["metaspace"]
    byte = {value: tokenizer.token_to_id(f"<0x{value:02X}>") for value in (0xC3, 0xA9, 0xFF)}
    stream = TextStream(tokenizer)
    chunks = run(stream, [byte[0xC3], byte[0xA9], byte[0xFF], tokenizer.token_to_id("h")])
    assert chunks == ["", "\u00e9", "", MARK + "h", ""]


def test_endless_bytes_after_a_character_leave_it_whole(tokenizers):
    tokenizer = tokenizers["metaspace"]
    byte = {value: tokenizer.token_to_id(f"<0x{value:02X}>") for value in (0xC3, 0xA9, 0xFF)}
    ids = [byte[0xC3], byte[0xA9], *[byte[0xFF]] * 200, tokenizer.token_to_id("h")]
    stream = TextStream(tokenizer)
    run(stream, ids)
    assert stream.text == "\u00e9" + MARK * 200 + "h"


texts = st.text(
    st.sampled_from("helo wrd.\u00e9\u4f60") | st.just(EMOJI) | st.characters(codec="utf-8"),
    max_size=60,
)


@pytest.mark.parametrize("name", MAKERS)
@given(text=texts)
@relaxed
def test_chunks_joined_are_the_decoded_text(tokenizers, name, text):
    tokenizer = tokenizers[name]
    ids = tokenizer.encode(text)
    stream = TextStream(tokenizer)
    chunks = run(stream, ids)
    assert "".join(chunks) == stream.text == tokenizer.decode(ids)
    if MARK not in text:
        assert not any(MARK in chunk for chunk in chunks)


@pytest.mark.parametrize("name", ["s_tok", "gpt2", "straddling"])
@given(data=st.data())
@relaxed
def test_any_ids_give_the_decoded_text(tokenizers, name, data):
    tokenizer = tokenizers[name]
    ids = data.draw(st.lists(st.integers(0, tokenizer.vocab_size + 3), max_size=40))
    stream = TextStream(tokenizer)
    assert "".join(run(stream, ids)) == tokenizer.decode(ids)


@pytest.mark.parametrize("name", ["s_tok", "straddling"])
@given(text=texts, stop=st.lists(st.text(st.sampled_from("helo \u00e9"), min_size=1), max_size=3))
@relaxed
def test_a_cut_does_not_depend_on_the_tokens(tokenizers, name, text, stop):
    stream = TextStream(tokenizers[name], stop)
    run(stream, tokenizers[name].encode(text))
    ends = [(text.index(s) + len(s), text.index(s)) for s in stop if s in text]
    assert stream.text == (text[: min(ends)[1]] if ends else text)


class CountingDecoder:
    """A tokenizer that counts the ids it is asked to decode."""

    def __init__(self, inner):
        self._inner = inner
        self.special_ids = inner.special_ids
        self.id_to_token = inner.id_to_token
        self.most_ids = 0

    def decode(self, ids):
        self.most_ids = max(self.most_ids, len(ids))
        return self._inner.decode(ids)


@pytest.mark.parametrize(
    ("name", "unit"),
    [("s_tok", b"\xff"), ("s_tok", b"\xf0\x9f\x98"), ("s_tok", b"hello"), ("metaspace", b"\xff")],
)
def test_the_window_stays_short_whatever_comes(tokenizers, name, unit):
    tokenizer = tokenizers[name]
    decoder = CountingDecoder(tokenizer)
    alphabet = byte_alphabet()
    spell = "<0x{:02X}>".format if name == "metaspace" else alphabet.__getitem__
    ids = [tokenizer.token_to_id(spell(byte)) for byte in unit * 400]
    stream = TextStream(decoder)
    chunks = run(stream, ids)
    assert decoder.most_ids <= 65
    assert "".join(chunks) == tokenizer.decode(ids)


def test_characters_that_never_end_with_a_token_come_without_delay(tokenizers):
    tokenizer = tokenizers["straddling"]
    text = EMOJI * 300
    ids = tokenizer.encode(text)
    assert len(ids) < len(byte_ids(text))
    decoder = CountingDecoder(tokenizer)
    stream = TextStream(decoder)
    lengths = itertools.accumulate(len(stream.push(token_id)) for token_id in ids[:-1])
    assert max(abs(length - i / 3) for i, length in enumerate(lengths)) <= 2
    stream.push(ids[-1])
    assert stream.finish() == ""
    assert stream.text == text
    assert decoder.most_ids <= 65
