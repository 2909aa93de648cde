"""The pattern by which an unknown resource is taken for an accelerator: its vendor's domain, or a word in its name."""

import re

from vcuda.requests.schemes import SCHEMES

VENDORS = (
    *dict.fromkeys(scheme.vendor_domain for scheme in SCHEMES),
    "amd.com",
    "habana.ai",
    "huawei.com/Ascend*",
    "alibabacloud.com/ppu*",
    "aws.amazon.com/neuron*",
    "birentech.com",
    "cambricon.com",
    "elasticgpu.io",
    "enflame.com",
    "furiosa.ai",
    "graphcore.ai",
    "hygon.com",
    "iluvatar.ai",
    "iluvatar.com",
    "kunlunxin.com",
    "metax-tech.com",
    "microsoft.com/directx*",
    "mthreads.com",
    "qualcomm.com/qaic*",
    "rebellions.ai",
    "tenstorrent.com",
    "vastaitech.com",
)
"""The domains of accelerator vendors whose resource names do not say what they are. If a domain also has other
resources, a slash and the beginning of the accelerators' resource names follow."""

# This pattern matches names such as volcano.sh/gpu-memory, baidu.com/xpu, cloud-tpus.google.com/v3 and
# doslab.io/vcuda-core. A plugin for any device file names its resources after /dev, such as smarter-devices/nvidia0 and
# squat.ai/dri. The words dpu, ipu, fpga, rdma, qat, card and accelerator are left out, because they often name other
# devices.
_TELLING_WORD = (
    r"(?=[^/]*/)(?:.*[^a-z0-9])?"
    r"(?:gpu[a-z0-9]*|[a-z0-9]*gpu|[hnptx]pu|[dg]cu|mlu|v?cuda|nvidia[a-z]*|dri|kfd|renderd|accel|mig-[1-9]g)"
    r"s?[0-9]*(?![a-z0-9])"
)


def _pattern_of(domain: str) -> str:
    # A vendor domain without a slash includes its subdomains. A domain with a slash is the beginning of resource names.
    name, _, prefix = domain.partition("/")
    if prefix:
        return f"{re.escape(name)}/{re.escape(prefix.removesuffix('*'))}"
    return rf"(?:[^/]*\.)?{re.escape(name)}/"


# All patterns are joined in one for speed, because a pod may have tens of thousands of resources.
ACCELERATOR = re.compile("|".join([*map(_pattern_of, VENDORS), _TELLING_WORD]), re.ASCII | re.IGNORECASE)
"""Matches the beginning of a resource's name if the resource is probably an accelerator."""
