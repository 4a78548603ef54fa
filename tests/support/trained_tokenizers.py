"""Tokenizers of 400 words with special tokens, as those of models: trained on texts of `mixed_texts`."""

from __future__ import annotations

import base64
import functools
import zlib
from collections.abc import Callable
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, models, normalizers, pre_tokenizers, processors, trainers

from hdexport.package.tokenizer.check import COMPARED
from support.mixed_texts import PARTS, text_of

_CHARSMAP = zlib.decompress(
    base64.b85decode(
        "c-k%03w%#y9LMqRvvXEWR4SEjE+G@kC22{Lq$Np`mX;(!2rVITHoGzAvb$|YNhTyo!bk{3T1bl}bfH?3BuV-_|Npbs>-~Dp+4-"
        "O6zZcKvr;8-jm!hJi8j+Hbf*my@RI9F(#Qh%b=e3YLR+eD-"
        "4blMCpnilhdCpI8lfCDipo=u0>m)u?{+hI5pmZVkY#m&TTDTM|drP%huRt9v*%P6wS^3If;ZEr~R<;Q0p#g42G;To~v_(6_qCM6n"
        "dMcN%4qSIcCv;Zm&k5F!jZjzCICMjI^gvJa0)I-dw1uZ7c&DwWWhjgCv?$Wk+Z{YD#+!{jEx=n?i1}NL=HU&zj`EG3*2Q|-"
        "z`B0Brw<!=TFw1h)-}<d-Z!3Ba{mGAD)xStJ(u%6@9}&E-"
        "#fjo(X`q|Gop>MSf|u6$~b0}8D%t;>(re_DM+s{N~<(Vsx}&!6QRjfM#(5?Y*dU=%tfIwDqznd);a8v8*h};(<r}zQ6B3o?q{-"
        "Q#~ICL?Zdx8Jo+L5{gA?cY=71?*5_G=-"
        "~|lFbbdDtFLFH!FJUJ4*?5`jSCGT?IM!FeQ3xj4bAic7MLMP+GrV6g1GB&$K`!!9h$57+*CLc~U5W+voPgg2i|zTrGJ7_$!k#az!"
        "fLFs=L75UQTSdTvu?&G*oIH-naAh&0$+xoYb*GSwqu)pFT;q>YV!djKCfNi9aVt$v>Uvuy$W@sefSEM_!|514XSVe2k|Wq;X53`V"
        "f=va@e__OF*?S2)IKXVI&##gn(JTfGyH}V_#G$l2TtKnoW@@`gTHYW|KJ?{#d-Xv@DJT9LZQwnNwR5QpisZEBZ7ui19YsKpk-YGd"
        "e&tM^{mT5)4CFLt*b!Sx(2kZYZYo+*Mq)wBkG06kLX+t!7NcDG)5E9zM6vm)eOu4H3zduF}M{i(F(1>e9&!RM(B1hCv*px6}l753"
        "*7}~h3*FPLid1~p?ksH(0yQb=zcIe^Z=M2dJxPIJp|^69tN{SkAQiiN5M?dV_>f6anP2Y0Db96(3qYAo#|=Nnw|-"
        "_re_tJt$GfOP7MmTr@^2<4FwHq80b(V!VPL9=uo3Ui%JZ4s4<{LjSaV`@t{Xd08MHlCfNZF+Eg;=Q?`8?m2IC+l>u7SRAjpL?F`5"
        "Q-"
        "O9F4yPEB0fNh_Kl?OUj0ccrsK+h@;x2(A+weQCJ%p+gfLwx3uuiSCIaz^>eAMPs;g$ce2P_#5sb5K$qsbVa%dvKq`J3*YU$*jrjm"
        "CE}m+^4f&8v9J)cNsj(jP^B^b$YC?X{~(bt*<Or=7Khc=YlrbzOlu%zty#GXMk=0GuZZby7qUu_A6ZbyIuQxUHki7`<1T!{jU8g*"
        "Zx7*{vp@?5!b$*0YADKVB5Dd;Ai~e+OKx)A9wAaaP6OT?Vob(pLXq^aqXXV?Voe)+ZjNB^>-"
        "wZU_<h2M0!ogt|`eiBe&+H7NeM$7*cCVW~~k<rL-osHe}Y8#M+TpENQhTs}3a9k(@e_QfD&iLPA~1Cr)uY(#fYA>2xQX9wgI~TzZ"
        "j8Z!+maBJt$WmoyT{q8~~0Cx-!~Fpvxe4WWa<G%%F&Ka8_Kf^$ETGe4U1p2%4r!#N+z86VI2p1|3js7+=1AE1Pl!T"
    )
)
"""SentencePiece's map of a few characters: wide ones, spaces, ``\ufb01``, ``\u2026``, ``e\u0301``."""

_SPECIAL = ("<s>", "<pad>", "</s>", "<unk>", "<mask>")
"""By their ids."""


def _trained(model: Any, normalizer: Any, pre_tokenizer: Any, *, normalized: bool = False) -> Tokenizer:
    tokenizer = Tokenizer(model)
    if normalizer is not None:
        tokenizer.normalizer = normalizer
    tokenizer.pre_tokenizer = pre_tokenizer
    common = {"vocab_size": 400, "show_progress": False, "special_tokens": list(_SPECIAL)}
    trainer = {
        models.WordPiece: lambda: trainers.WordPieceTrainer(**common),
        models.Unigram: lambda: trainers.UnigramTrainer(unk_token="<unk>", **common),
        models.BPE: lambda: trainers.BpeTrainer(initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), **common),
    }[type(model)]()
    tokenizer.train_from_iterator([text_of(40, seed) for seed in range(40)], trainer)
    tokenizer.add_special_tokens(
        [
            *(AddedToken(token, normalized=normalized) for token in _SPECIAL[:-1]),
            AddedToken("<mask>", lstrip=True, normalized=normalized),
        ]
    )
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A </s>", pair="<s> $A </s> $B </s>", special_tokens=[("<s>", 0), ("</s>", 2)]
    )
    return tokenizer


_WORDS = pre_tokenizers.Sequence([pre_tokenizers.WhitespaceSplit(), pre_tokenizers.Metaspace()])
_PRECOMPILED = normalizers.Precompiled(_CHARSMAP)

TOKENIZERS: dict[str, Callable[[], Tokenizer]] = {
    "BERT": lambda: _trained(
        models.WordPiece(unk_token="<unk>"), normalizers.BertNormalizer(), pre_tokenizers.BertPreTokenizer()
    ),
    "BERT, cased": lambda: _trained(
        models.WordPiece(unk_token="<unk>", max_input_chars_per_word=20),
        normalizers.BertNormalizer(lowercase=False, strip_accents=False, handle_chinese_chars=False),
        pre_tokenizers.BertPreTokenizer(),
    ),
    "RoBERTa": lambda: _trained(models.BPE(), None, pre_tokenizers.ByteLevel(add_prefix_space=False), normalized=True),
    "RoBERTa, a space first": lambda: _trained(models.BPE(), None, pre_tokenizers.ByteLevel(add_prefix_space=True)),
    "ModernBERT": lambda: _trained(
        models.BPE(), normalizers.NFC(), pre_tokenizers.ByteLevel(add_prefix_space=False), normalized=True
    ),
    "XLM-RoBERTa": lambda: _trained(models.Unigram(), _PRECOMPILED, _WORDS),
    "BGE-M3": lambda: _trained(
        models.Unigram(),
        normalizers.Sequence([_PRECOMPILED, normalizers.Strip(left=False), normalizers.Replace(Regex(" {2,}"), " ")]),
        pre_tokenizers.Metaspace(),
    ),
    "Unigram, any spaces": lambda: _trained(models.Unigram(), None, pre_tokenizers.Metaspace()),
}
"""Name of a model that has such a tokenizer -> the tokenizer."""


@functools.cache
def trained_tokenizer(name: str) -> Tokenizer:
    """A tokenizer of `TOKENIZERS`; not to be changed."""
    return TOKENIZERS[name]()


CODE_POINTS = sorted(
    {*map(chr, (*range(1, 0x600), *range(0x1100, 0x1200), *range(0x1E00, 0x2700), *range(0xFE00, 0x10000)))}
    | {letter for text in (*PARTS, *(each for texts in COMPARED.values() for each in texts)) for letter in text}
)
"""Characters of the texts that tests compare, and some more: those of all planes take a second to normalize."""
