"""The ways of living with a delay, by name; the next one is one line here, an entry point, or a dotted path.

A chunking is a function (policy, delay, options by name) -> policy; see `robopolicy.inference.chunking.Chunking`.
"""

from robopolicy.core.registry import Registry

SYNCHRONOUS = "synchronous"

CHUNKINGS = Registry(
    "chunking",
    "robopolicy.chunking",
    {
        SYNCHRONOUS: "robopolicy.inference.chunking:synchronous",
        "prefetch": "robopolicy.inference.chunking:prefetch",
        "ensembling": "robopolicy.inference.ensembling:ensembling",
        "bidirectional": "robopolicy.inference.ensembling:bidirectional",
        "rtc": "robopolicy.inference.rtc:rtc",
        "trained_rtc": "robopolicy.inference.rtc:trained_rtc",
        "lerobot_rtc": "robopolicy.inference.rtc:lerobot_rtc",
    },
)
