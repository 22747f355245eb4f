"""What NVIDIA cards can do: memory, compute capability, dense tensor peaks, memory bandwidth.

Peaks are dense (never the doubled "with sparsity" figure) and with FP32 accumulation, in TFLOP/s:
what a training step can reach at most. None means that the unit does not exist or that we do not
know the number; nothing here is a guess. Memory is what nvidia-smi shows, in MiB.

Rules from the FP32 shader rate (cores x 2 x boost clock):
- GeForce RTX 30, 40, 50: bf16 = fp16 = 2x, tf32 = 1x, fp8 = 4x from the RTX 40 on.
- The workstation cards with the same chips: bf16 = fp16 = 4x, tf32 = 2x, fp8 = 8x from Ada on.
- Turing: fp16 = 8x; GeForce RTX 20 halves that with FP32 accumulation. No bf16, tf32 or fp8.
- GTX 16: no tensor cores, fp16 is 2x on the shaders.
Data-centre peaks are those of the data sheets.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace

Capability = tuple[int, int]

PASCAL: Capability = (6, 0)
VOLTA: Capability = (7, 0)
TURING: Capability = (7, 5)
AMPERE_CENTRE: Capability = (8, 0)
AMPERE: Capability = (8, 6)
ADA: Capability = (8, 9)
HOPPER: Capability = (9, 0)
BLACKWELL_CENTRE: Capability = (10, 0)
BLACKWELL_ULTRA: Capability = (10, 3)
BLACKWELL: Capability = (12, 0)


@dataclass(frozen=True, kw_only=True)
class Card:
    """One card as it is sold; peaks in TFLOP/s, dense, with FP32 accumulation."""

    slug: str
    name: str
    memory_gib: float
    capability: Capability
    bf16_tflops: float | None = None
    fp16_tflops: float | None = None
    tf32_tflops: float | None = None
    fp8_tflops: float | None = None
    bandwidth_gbs: float | None = None
    nvml_names: tuple[str, ...]
    """Product names by which NVML means this card, as today's drivers spell them."""


def _card(
    slug: str,
    name: str,
    mib: int,
    capability: Capability,
    bandwidth: float | None = None,
    *,
    shader: float | None = None,
    times: int = 2,
) -> Card:
    """A card whose bf16 runs at `times` its FP32 shader rate; unknown peaks without that rate."""
    peaks: dict[str, float] = {}
    if shader is not None:
        peaks["fp16_tflops"] = round(times * shader, 1)
        if capability >= AMPERE:
            peaks["bf16_tflops"] = peaks["fp16_tflops"]
            peaks["tf32_tflops"] = round(times / 2 * shader, 1)
        if capability >= ADA:
            peaks["fp8_tflops"] = round(2 * times * shader, 1)
    return Card(
        slug=slug,
        name=name,
        memory_gib=mib / 1024,
        capability=capability,
        bandwidth_gbs=bandwidth,
        nvml_names=(f"NVIDIA {name}",),
        **peaks,
    )


def _gtx(slug: str, name: str, mib: int, shader: float, bandwidth: float) -> Card:
    return _card(slug, name, mib, TURING, bandwidth, shader=shader)


def _named_by_size(card: Card) -> Card:
    """With the memory size in its name where the slug has one and the name does not."""
    size = re.search(r"-(\d+)gb$", card.slug)
    if size is None or f"{size[1]}GB" in card.name:
        return card
    return replace(card, name=f"{card.name} {size[1]} GB")


def _geforce(
    slug: str, name: str, mib: int, shader: float, bandwidth: float, capability: Capability
) -> Card:
    times = 4 if capability == TURING else 2
    return _named_by_size(_card(slug, name, mib, capability, bandwidth, shader=shader, times=times))


def _workstation(
    slug: str, name: str, mib: int, shader: float | None, bandwidth: float, capability: Capability
) -> Card:
    times = 8 if capability == TURING else 4
    return _card(slug, name, mib, capability, bandwidth, shader=shader, times=times)


def _laptop(slug: str, model: str, mib: int, capability: Capability) -> Card:
    """A laptop chip: its clocks, hence its peaks, follow the power limit the maker set."""
    return _named_by_size(_card(slug, f"GeForce {model} Laptop GPU", mib, capability))


def _centre(
    slug: str,
    name: str,
    mib: int,
    capability: Capability,
    peaks: tuple[float | None, float | None, float | None],
    bandwidth: float,
    *nvml_names: str,
) -> Card:
    """A data-centre card; peaks are (fp16, tf32, fp8), and bf16 equals fp16 from Ampere on."""
    fp16, tf32, fp8 = peaks
    return replace(
        _card(slug, name, mib, capability, bandwidth),
        bf16_tflops=fp16 if capability >= AMPERE_CENTRE else None,
        fp16_tflops=fp16,
        tf32_tflops=tf32,
        fp8_tflops=fp8,
        nvml_names=nvml_names,
    )


# slug, NVML name without "NVIDIA", MiB, FP32 shader TFLOP/s, GB/s, capability.
# Up to Turing a laptop chip may carry the desktop name; its peaks are then an upper bound.
_GEFORCE = (
    _gtx("gtx-1650", "GeForce GTX 1650", 4096, 2.98, 128.0),  # the GDDR5 one
    _gtx("gtx-1650-super", "GeForce GTX 1650 SUPER", 4096, 4.42, 192.0),
    _gtx("gtx-1660", "GeForce GTX 1660", 6144, 5.03, 192.0),
    _gtx("gtx-1660-super", "GeForce GTX 1660 SUPER", 6144, 5.03, 336.0),
    _gtx("gtx-1660-ti", "GeForce GTX 1660 Ti", 6144, 5.44, 288.0),
    _geforce("rtx-2060-6gb", "GeForce RTX 2060", 6144, 6.45, 336.0, TURING),
    _geforce("rtx-2060-12gb", "GeForce RTX 2060", 12288, 7.18, 336.0, TURING),
    _geforce("rtx-2060-super", "GeForce RTX 2060 SUPER", 8192, 7.18, 448.0, TURING),
    _geforce("rtx-2070", "GeForce RTX 2070", 8192, 7.46, 448.0, TURING),
    _geforce("rtx-2070-super", "GeForce RTX 2070 SUPER", 8192, 9.06, 448.0, TURING),
    _geforce("rtx-2080", "GeForce RTX 2080", 8192, 10.07, 448.0, TURING),
    _geforce("rtx-2080-super", "GeForce RTX 2080 SUPER", 8192, 11.15, 496.0, TURING),
    _geforce("rtx-2080-ti", "GeForce RTX 2080 Ti", 11264, 13.45, 616.0, TURING),
    _workstation("titan-rtx", "TITAN RTX", 24576, 16.31, 672.0, TURING),  # full rate, unlike RTX 20
    _geforce("rtx-3050-6gb", "GeForce RTX 3050", 6144, 6.77, 168.0, AMPERE),
    _geforce("rtx-3050-8gb", "GeForce RTX 3050", 8192, 9.10, 224.0, AMPERE),
    _geforce("rtx-3060", "GeForce RTX 3060", 12288, 12.74, 360.0, AMPERE),
    _geforce("rtx-3060-ti", "GeForce RTX 3060 Ti", 8192, 16.20, 448.0, AMPERE),
    _geforce("rtx-3070", "GeForce RTX 3070", 8192, 20.31, 448.0, AMPERE),
    _geforce("rtx-3070-ti", "GeForce RTX 3070 Ti", 8192, 21.75, 608.0, AMPERE),
    _geforce("rtx-3080-10gb", "GeForce RTX 3080", 10240, 29.77, 760.0, AMPERE),
    _geforce("rtx-3080-12gb", "GeForce RTX 3080", 12288, 30.64, 912.0, AMPERE),
    _geforce("rtx-3080-ti", "GeForce RTX 3080 Ti", 12288, 34.10, 912.0, AMPERE),
    _geforce("rtx-3090", "GeForce RTX 3090", 24576, 35.58, 936.0, AMPERE),
    _geforce("rtx-3090-ti", "GeForce RTX 3090 Ti", 24564, 40.00, 1008.0, AMPERE),
    _geforce("rtx-4060", "GeForce RTX 4060", 8188, 15.11, 272.0, ADA),
    _geforce("rtx-4060-ti-8gb", "GeForce RTX 4060 Ti", 8188, 22.06, 288.0, ADA),
    _geforce("rtx-4060-ti-16gb", "GeForce RTX 4060 Ti", 16380, 22.06, 288.0, ADA),
    _geforce("rtx-4070", "GeForce RTX 4070", 12282, 29.15, 504.0, ADA),
    _geforce("rtx-4070-super", "GeForce RTX 4070 SUPER", 12282, 35.48, 504.0, ADA),
    _geforce("rtx-4070-ti", "GeForce RTX 4070 Ti", 12282, 40.09, 504.0, ADA),
    _geforce("rtx-4070-ti-super", "GeForce RTX 4070 Ti SUPER", 16376, 44.10, 672.0, ADA),
    _geforce("rtx-4080", "GeForce RTX 4080", 16376, 48.74, 716.8, ADA),
    _geforce("rtx-4080-super", "GeForce RTX 4080 SUPER", 16376, 52.22, 736.0, ADA),
    _geforce("rtx-4090-d", "GeForce RTX 4090 D", 24564, 73.54, 1008.0, ADA),
    _geforce("rtx-4090", "GeForce RTX 4090", 24564, 82.58, 1008.0, ADA),
    _geforce("rtx-5050", "GeForce RTX 5050", 8151, 13.17, 320.0, BLACKWELL),
    _geforce("rtx-5060", "GeForce RTX 5060", 8151, 19.18, 448.0, BLACKWELL),
    _geforce("rtx-5060-ti-8gb", "GeForce RTX 5060 Ti", 8151, 23.70, 448.0, BLACKWELL),
    _geforce("rtx-5060-ti-16gb", "GeForce RTX 5060 Ti", 16311, 23.70, 448.0, BLACKWELL),
    _geforce("rtx-5070", "GeForce RTX 5070", 12227, 30.87, 672.0, BLACKWELL),
    _geforce("rtx-5070-ti", "GeForce RTX 5070 Ti", 16303, 43.94, 896.0, BLACKWELL),
    _geforce("rtx-5080", "GeForce RTX 5080", 16303, 56.28, 960.0, BLACKWELL),
    _geforce("rtx-5090", "GeForce RTX 5090", 32607, 104.75, 1792.0, BLACKWELL),
)

_LAPTOPS = (
    _laptop("rtx-3060-laptop", "RTX 3060", 6144, AMPERE),
    _laptop("rtx-3070-laptop", "RTX 3070", 8192, AMPERE),
    _laptop("rtx-3070-ti-laptop", "RTX 3070 Ti", 8192, AMPERE),
    _laptop("rtx-3080-laptop-8gb", "RTX 3080", 8192, AMPERE),
    _laptop("rtx-3080-laptop-16gb", "RTX 3080", 16384, AMPERE),
    _laptop("rtx-3080-ti-laptop", "RTX 3080 Ti", 16384, AMPERE),
    _laptop("rtx-4050-laptop", "RTX 4050", 6141, ADA),
    _laptop("rtx-4060-laptop", "RTX 4060", 8188, ADA),
    _laptop("rtx-4070-laptop", "RTX 4070", 8188, ADA),
    _laptop("rtx-4080-laptop", "RTX 4080", 12282, ADA),
    _laptop("rtx-4090-laptop", "RTX 4090", 16376, ADA),
    _laptop("rtx-5060-laptop", "RTX 5060", 8151, BLACKWELL),
    _laptop("rtx-5070-laptop", "RTX 5070", 8151, BLACKWELL),
    _laptop("rtx-5070-ti-laptop", "RTX 5070 Ti", 12227, BLACKWELL),
    _laptop("rtx-5080-laptop", "RTX 5080", 16303, BLACKWELL),
    _laptop("rtx-5090-laptop", "RTX 5090", 24463, BLACKWELL),
)

# The same columns as _GEFORCE. Published shader rates of the RTX PRO 4000, 4500, 5000 and of the
# 6000 Server Edition disagree with each other, so their peaks stay unknown.
_PRO_6000 = "RTX PRO 6000 Blackwell"
_WORKSTATION = (
    _workstation("quadro-rtx-4000", "Quadro RTX 4000", 8192, 7.12, 416.0, TURING),
    _workstation("quadro-rtx-5000", "Quadro RTX 5000", 16384, 11.15, 448.0, TURING),
    _workstation("quadro-rtx-6000", "Quadro RTX 6000", 24576, 16.31, 672.0, TURING),
    _workstation("quadro-rtx-8000", "Quadro RTX 8000", 49152, 16.31, 672.0, TURING),
    _workstation("rtx-a2000-6gb", "RTX A2000", 6138, 7.99, 288.0, AMPERE),
    _workstation("rtx-a2000-12gb", "RTX A2000 12GB", 12282, 7.99, 288.0, AMPERE),
    _workstation("rtx-a4000", "RTX A4000", 16376, 19.17, 448.0, AMPERE),
    _workstation("rtx-a4500", "RTX A4500", 20470, 23.65, 640.0, AMPERE),
    _workstation("rtx-a5000", "RTX A5000", 24564, 27.77, 768.0, AMPERE),
    _workstation("rtx-a5500", "RTX A5500", 24564, 34.10, 768.0, AMPERE),
    _workstation("rtx-a6000", "RTX A6000", 49140, 38.71, 768.0, AMPERE),
    _workstation("rtx-2000-ada", "RTX 2000 Ada Generation", 16380, 12.00, 224.0, ADA),
    _workstation("rtx-4000-ada", "RTX 4000 Ada Generation", 20475, 26.73, 360.0, ADA),
    _workstation("rtx-4000-sff-ada", "RTX 4000 SFF Ada Generation", 20475, 19.17, 280.0, ADA),
    _workstation("rtx-4500-ada", "RTX 4500 Ada Generation", 24570, 39.63, 432.0, ADA),
    _workstation("rtx-5000-ada", "RTX 5000 Ada Generation", 32760, 65.28, 576.0, ADA),
    _workstation("rtx-6000-ada", "RTX 6000 Ada Generation", 49140, 91.06, 960.0, ADA),
    _workstation("rtx-pro-4000", "RTX PRO 4000 Blackwell", 24576, None, 672.0, BLACKWELL),
    _workstation("rtx-pro-4500", "RTX PRO 4500 Blackwell", 32768, None, 896.0, BLACKWELL),
    _workstation("rtx-pro-5000", "RTX PRO 5000 Blackwell", 49152, None, 1344.0, BLACKWELL),
    _workstation(
        "rtx-pro-6000", f"{_PRO_6000} Workstation Edition", 97887, 125.95, 1792.0, BLACKWELL
    ),
    _workstation(
        "rtx-pro-6000-max-q",
        f"{_PRO_6000} Max-Q Workstation Edition",
        97887,
        109.73,
        1792.0,
        BLACKWELL,
    ),
    _workstation(
        "rtx-pro-6000-server", f"{_PRO_6000} Server Edition", 97887, None, 1597.0, BLACKWELL
    ),
)

# slug, name, MiB, capability, (fp16, tf32, fp8), GB/s, NVML names. Peak tuples that recur:
_P100_PCIE, _P100_SXM = (18.7, None, None), (21.2, None, None)  # shaders: no tensor cores yet
_V100_PCIE, _V100_SXM, _V100S = (112.0, None, None), (125.0, None, None), (130.0, None, None)
_A100 = (312.0, 156.0, None)
_HOPPER_SXM, _HOPPER_NVL = (989.4, 494.7, 1978.9), (835.5, 417.5, 1671.0)
_B200 = (2250.0, 1125.0, 4500.0)
# fmt: off
_CENTRE = (
    _centre("p100", "P100 PCIe", 16384, PASCAL, _P100_PCIE, 732.0, "Tesla P100-PCIE-16GB"),
    _centre("p100-sxm", "P100 SXM", 16384, PASCAL, _P100_SXM, 732.0, "Tesla P100-SXM2-16GB"),
    _centre("v100-16gb", "V100 SXM 16 GB", 16384, VOLTA, _V100_SXM, 900.0, "Tesla V100-SXM2-16GB"),
    _centre("v100-32gb", "V100 SXM 32 GB", 32768, VOLTA, _V100_SXM, 900.0, "Tesla V100-SXM2-32GB"),
    _centre("v100-pcie-16gb", "V100 PCIe 16 GB", 16384, VOLTA, _V100_PCIE, 900.0,
            "Tesla V100-PCIE-16GB"),
    _centre("v100-pcie-32gb", "V100 PCIe 32 GB", 32768, VOLTA, _V100_PCIE, 900.0,
            "Tesla V100-PCIE-32GB"),
    _centre("v100s", "V100S PCIe 32 GB", 32768, VOLTA, _V100S, 1134.0, "Tesla V100S-PCIE-32GB"),
    _centre("t4", "T4", 15360, TURING, (65.0, None, None), 320.0, "Tesla T4", "NVIDIA T4"),
    _centre("a2", "A2", 15356, AMPERE, (18.0, 9.0, None), 200.0, "NVIDIA A2"),
    _centre("a10", "A10", 23028, AMPERE, (125.0, 62.5, None), 600.0, "NVIDIA A10"),
    _centre("a10g", "A10G", 23028, AMPERE, (70.0, 35.0, None), 600.0, "NVIDIA A10G"),
    _centre("a30", "A30", 24576, AMPERE_CENTRE, (165.0, 82.0, None), 933.0, "NVIDIA A30"),
    _centre("a40", "A40", 46068, AMPERE, (149.7, 74.8, None), 696.0, "NVIDIA A40"),
    _centre("a100-40gb", "A100 SXM 40 GB", 40960, AMPERE_CENTRE, _A100, 1555.0,
            "NVIDIA A100-SXM4-40GB"),
    _centre("a100-80gb", "A100 SXM 80 GB", 81920, AMPERE_CENTRE, _A100, 2039.0,
            "NVIDIA A100-SXM4-80GB", "NVIDIA A100-SXM-80GB"),
    _centre("a100-pcie-40gb", "A100 PCIe 40 GB", 40960, AMPERE_CENTRE, _A100, 1555.0,
            "NVIDIA A100-PCIE-40GB"),
    _centre("a100-pcie-80gb", "A100 PCIe 80 GB", 81920, AMPERE_CENTRE, _A100, 1935.0,
            "NVIDIA A100 80GB PCIe"),
    _centre("l4", "L4", 23034, ADA, (121.0, 60.0, 242.0), 300.0, "NVIDIA L4"),
    _centre("l40", "L40", 46068, ADA, (181.0, 90.5, 362.0), 864.0, "NVIDIA L40"),
    _centre("l40s", "L40S", 46068, ADA, (362.0, 183.0, 733.0), 864.0, "NVIDIA L40S"),
    _centre("h20", "H20", 97871, HOPPER, (148.0, 74.0, 296.0), 4000.0, "NVIDIA H20"),
    _centre("h100-pcie", "H100 PCIe", 81559, HOPPER, (756.0, 378.0, 1513.0), 2039.0,
            "NVIDIA H100 PCIe"),
    _centre("h100", "H100 SXM", 81559, HOPPER, _HOPPER_SXM, 3350.0, "NVIDIA H100 80GB HBM3"),
    _centre("h100-nvl", "H100 NVL", 95830, HOPPER, _HOPPER_NVL, 3938.0, "NVIDIA H100 NVL"),
    _centre("h200", "H200 SXM", 143771, HOPPER, _HOPPER_SXM, 4800.0, "NVIDIA H200"),
    _centre("h200-nvl", "H200 NVL", 143771, HOPPER, _HOPPER_NVL, 4800.0, "NVIDIA H200 NVL"),
    _centre("gh200-96gb", "GH200 96 GB", 97871, HOPPER, _HOPPER_SXM, 4000.0, "NVIDIA GH200 480GB"),
    _centre("gh200-144gb", "GH200 144 GB", 147456, HOPPER, _HOPPER_SXM, 4900.0,
            "NVIDIA GH200 144G HBM3e"),
    _centre("b200", "B200", 183359, BLACKWELL_CENTRE, _B200, 8000.0, "NVIDIA B200"),
    _centre("b300", "B300", 275040, BLACKWELL_ULTRA, _B200, 8000.0, "NVIDIA B300 SXM6 AC"),
)
# fmt: on

CARDS: tuple[Card, ...] = _GEFORCE + _LAPTOPS + _WORKSTATION + _CENTRE
