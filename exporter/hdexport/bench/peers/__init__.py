"""Other ways to run the model of a bundle, one file per library."""

from __future__ import annotations

__all__ = ["PEERS"]


from hdexport.bench.peers.onnx_plain import OnnxPlain
from hdexport.bench.peers.openvino import OpenVino, OpenVinoDefault, OpenVinoInt8
from hdexport.bench.peers.optimum import Optimum
from hdexport.bench.peers.peer import Peer
from hdexport.bench.peers.sentence_transformers import SentenceTransformers
from hdexport.bench.peers.torch_model import TorchCompile, TorchEager

PEERS: dict[str, Peer] = {
    peer.name: peer
    for peer in (
        TorchEager(),
        TorchCompile(),
        OpenVino(),
        OpenVinoDefault(),
        OpenVinoInt8(),
        OnnxPlain(),
        Optimum(),
        SentenceTransformers(),
    )
}
"""Name -> peer, in the order of tables."""
