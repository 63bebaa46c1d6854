"""What the user wants: frozen settings, YAML loading, the reference of all keys."""

from zeroinfer.config.environment import default_nvme_folder, let_idle_threads_sleep
from zeroinfer.config.flags import FLAG_KEYS
from zeroinfer.config.loading import load_config, make_config
from zeroinfer.config.reference import KeyHelp, describe_config, render_reference
from zeroinfer.config.tree import (
    ComputeConfig,
    EngineConfig,
    IoConfig,
    KvConfig,
    ModelConfig,
    OffloadConfig,
    SchedulerConfig,
)

__all__ = [
    "FLAG_KEYS",
    "ComputeConfig",
    "EngineConfig",
    "IoConfig",
    "KeyHelp",
    "KvConfig",
    "ModelConfig",
    "OffloadConfig",
    "SchedulerConfig",
    "default_nvme_folder",
    "describe_config",
    "let_idle_threads_sleep",
    "load_config",
    "make_config",
    "render_reference",
]
