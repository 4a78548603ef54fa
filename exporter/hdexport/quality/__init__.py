"""`hdexport quality`: retrieval of long texts by sentences of their own, read whole, in chunks or cut."""
