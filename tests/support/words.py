"""Sixteen words: goods that differ in more than a number."""

WORDS = [
    "ash",
    "birch",
    "cedar",
    "elm",
    "fir",
    "hazel",
    "ivy",
    "larch",
    "maple",
    "oak",
    "pine",
    "rowan",
    "sorrel",
    "teak",
    "willow",
    "yew",
]
