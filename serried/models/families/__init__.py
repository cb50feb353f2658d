"""The families that Serried knows."""

from __future__ import annotations

from serried.errors import InputError
from serried.models.families.gemma import GEMMA2, GEMMA3, GEMMA3_IMAGES
from serried.models.families.llama import LLAMA
from serried.models.families.mistral import MISTRAL
from serried.models.families.phi3 import PHI3
from serried.models.families.qwen2 import QWEN2
from serried.models.families.qwen3 import QWEN3
from serried.models.family import Family

FAMILIES: tuple[Family, ...] = (LLAMA, MISTRAL, QWEN2, QWEN3, GEMMA2, GEMMA3, GEMMA3_IMAGES, PHI3)


def find_family(architecture: str, where: str) -> Family:
    """The family of an architecture as named by Hugging Face or by GGUF; `where` names the file in the error."""
    for family in FAMILIES:
        if architecture in (*family.architectures, *family.gguf_architectures):
            return family
    known = sorted(name for family in FAMILIES for name in (*family.architectures, *family.gguf_architectures))
    raise InputError(f"{where}: architecture {architecture!r} is not supported; supported are {', '.join(known)}")
