"""zeroinfer: offline LLM inference with weights streamed from DRAM or NVMe just ahead of use."""

__all__ = ["__version__"]

__version__ = "0.1.0"
