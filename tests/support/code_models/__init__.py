"""Checkpoints whose model is Python code of their own."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import torch

from support.code_models.modeling_slopes import SlopesConfig, SlopesModel
from support.tiny_models import PAD_TOKEN_ID


def save_slopes(path: Path, *, fault: str = "") -> SlopesModel:
    """Write a checkpoint of the type ``slopes``, which names its code, and return its model."""
    torch.manual_seed(0)
    model = SlopesModel(SlopesConfig(fault=fault, pad_token_id=PAD_TOKEN_ID)).eval()
    for parameter in model.parameters():
        if parameter.dim() > 1:
            torch.nn.init.normal_(parameter, std=0.3)
    model.save_pretrained(path)
    code = Path(__file__).with_name("modeling_slopes.py")
    shutil.copy(code, path)
    config = json.loads((path / "config.json").read_text())
    config["auto_map"] = {"AutoConfig": f"{code.stem}.SlopesConfig", "AutoModel": f"{code.stem}.SlopesModel"}
    (path / "config.json").write_text(json.dumps(config))
    return model
