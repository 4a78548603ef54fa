"""A tokenizer as nodes of a graph, with onnxruntime-extensions' operators: strings in, token ids and their mask out.

`graph` reads a tokenizer and writes the nodes that all models have; ``word_pieces.py``, ``byte_pairs.py`` and
``sentence_pieces.py`` write the nodes of one model each; `check` compares the ids with the tokenizer's.
"""
