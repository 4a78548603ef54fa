"""hdexport: from a Hugging Face checkpoint to a bundle that runs long documents."""

__all__ = ["__version__"]

__version__ = "0.1.0"
