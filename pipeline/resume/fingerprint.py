"""What a training is made of: only one that is made of the same is continued.

The data, the code that the stage imports, and the *what* half of params.yaml. How it runs (the device, the
memory plan, where it is logged) is no part of it: that may change between one start and the next.
"""

import hashlib
import json
from typing import Any

Inputs = dict[str, dict[str, Any]]  # "data", "code", "what": a name and its digest or value

PARTS = {"data": "data", "code": "code", "what": "params.yaml"}


def fingerprint(inputs: Inputs) -> str:
    """16 hexadecimal digits: the name of the training's folder."""
    return hashlib.sha256(canonical(inputs).encode()).hexdigest()[:16]


def canonical(value: Any) -> str:
    """As JSON with sorted keys: the same value gives the same text."""
    return json.dumps(value, sort_keys=True, default=str)


def differences(before: Inputs, now: Inputs) -> list[str]:
    """What differs, in words: "pipeline/models.py changed", "optimizer.lr 0.005 -> 0.001"."""
    found = []
    for part in PARTS:
        old, new = before.get(part, {}), now.get(part, {})
        for name in sorted(old.keys() | new.keys()):
            if canonical(old.get(name)) == canonical(new.get(name)):
                continue
            if part == "what":
                found.append(f"{name} {old.get(name, 'nothing')} -> {new.get(name, 'nothing')}")
            else:
                state = "is new" if name not in old else "is gone" if name not in new else "changed"
                found.append(f"{name} {state}")
    return found
