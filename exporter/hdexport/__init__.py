"""hdexport: from a Hugging Face checkpoint to a bundle that runs long documents."""

__all__ = ["__version__"]


def __getattr__(name: str) -> object:
    if name != "__version__":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    import hdruntime

    return hdruntime.__version__
