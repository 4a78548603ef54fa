"""A tokenizer as nodes of a graph, with onnxruntime-extensions' operators: strings in, token ids and their mask out.

`graph` reads a tokenizer and writes the nodes of all models, ``word_pieces.py``, ``byte_pairs.py`` and
``sentence_pieces.py`` those of one; `check` compares the ids with the tokenizer's.
"""
