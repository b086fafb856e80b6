"""What a thread of a compiled kernel executes, read off its listing (nvdisasm -c): instructions by pipe.

Static: nothing is run. Of two ways through a branch the one with fewer instructions is taken: a tile without a tail, a
program inside of its tensor, arguments that a root or quotient need not treat apart. A loop counts ten times, as often
as the cipher's turns.
"""

import re
import statistics
from collections import Counter
from typing import NamedTuple

TURNS = 10
# Which pipe of a multiprocessor of sm_90 starts an instruction (Nsight Compute's description of the pipes). The integer
# pipe starts 64 threads in a cycle, that of FP32 128, of which 64 may be integer multiply-adds.
PIPES = {
    "integer": "IADD3 VIADD LOP3 SHF ISETP SEL VIMNMX VIMNMX3 PRMT LEA I2FP IABS FSEL FSETP FMNMX PLOP3 P2R R2UR",
    "float": "FFMA FMUL FADD HFMA2 IMAD",
    "double": "DADD DMUL DFMA",
    "tensor": "HMMA HGMMA IMMA IGMMA DMMA",
    "special": "MUFU F2F I2F",
    "memory": "LDG STG LDGSTS",
}


class Instruction(NamedTuple):
    """Whether it is conditional, its name, where it may jump to, and the bytes of global memory that a thread moves."""

    conditional: bool
    name: str
    target: str | None
    moved: int


class Listing:
    """The instructions of a kernel and its labels."""

    def __init__(self, text: str) -> None:
        self.instructions: list[Instruction] = []
        self.labels: dict[str, int] = {}
        for line in text.splitlines():
            if label := re.match(r"^(\.L\w+):", line):
                self.labels[label[1]] = len(self.instructions)
            elif found := re.match(r"^\s+/\*[0-9a-f]+\*/\s+(@!?U?P\w+\s+)?([A-Z][A-Z0-9_]*)(.*)", line):
                target = re.search(r"`\((\.L\w+)\)", found[3]) if found[2] == "BRA" else None
                moved = moved_by(found[3]) if found[2] in PIPES["memory"].split() else 0
                self.instructions.append(Instruction(bool(found[1]), found[2], target[1] if target else None, moved))

    def _weights(self) -> list[int]:
        weights = [1] * len(self.instructions)
        for place, instruction in enumerate(self.instructions):
            first = self.labels.get(instruction.target or "", place)
            for inside in range(first, place + 1 if first < place else first):
                weights[inside] *= TURNS
        return weights

    def executed(self) -> Counter[str]:
        """Return how often each instruction runs, on the shortest way from the first one to an exit."""
        count, weights = len(self.instructions), self._weights()
        best: list[tuple[float, Counter[str]]] = [(float("inf"), Counter())] * count + [(float("inf"), Counter())]
        for place in range(count - 1, -1, -1):
            instruction = self.instructions[place]
            target = self.labels.get(instruction.target or "", place)
            if instruction.name == "EXIT" and not instruction.conditional:
                following: tuple[float, Counter[str]] = (0.0, Counter())
            else:
                ways = [best[place + 1]] if instruction.conditional or instruction.target is None else []
                ways += [best[target]] if target > place else []
                following = min(ways, key=lambda way: way[0], default=(float("inf"), Counter()))
            own = 0 if instruction.name == "NOP" else weights[place]
            best[place] = (following[0] + own, following[1] + Counter({instruction.name: own}))
        return best[0][1]

    def moved(self) -> tuple[int, int]:
        """Return how many loads and stores of global memory are listed, and their bytes: loops count once."""
        found = [instruction.moved for instruction in self.instructions if instruction.moved]
        return len(found), sum(found)

    def product_loop(self) -> Counter[str]:
        """Return the instructions of the shortest loop that has tensor-core instructions, or else that loads."""
        return min(self._product_loops() or self._loops(["LDG"]), key=Counter.total, default=Counter())

    def _product_loops(self) -> list[Counter[str]]:
        return self._loops(PIPES["tensor"].split())

    def _loops(self, names: list[str]) -> list[Counter[str]]:
        """Return the instructions of the loops that have one of these."""
        found: list[Counter[str]] = []
        for place, instruction in enumerate(self.instructions):
            first = self.labels.get(instruction.target or "", place)
            loop = Counter(each.name for each in self.instructions[first : place + 1] if each.name != "NOP")
            found += [loop] if first < place and any(loop[name] for name in names) else []
        return found

    def around_product_loop(self) -> int:
        """Return the other instructions of the longest loop around that of `product_loop`."""
        totals = [loop.total() for loop in self._product_loops()]
        return max(totals, default=0) - min(totals, default=0)

    def reading_loops(self) -> list[int]:
        """Return the instructions of each loop that reads global memory, in their order."""
        return [loop.total() for loop in self._loops(["LDG"])]

    def loads_together(self) -> float:
        """Return how many loads stand between two stores, where any do: the median."""
        runs, run = [], 0
        for instruction in self.instructions:
            if instruction.name == "STG":
                runs += [run] if run else []
                run = 0
            run += instruction.name == "LDG"
        return statistics.median(runs or [run])


def by_pipe(executed: Counter[str], elements: int) -> dict[str, float]:
    """Return the instructions of a thread for each of its elements: in all, and of each pipe."""
    found = {"all": sum(executed.values()) / elements}
    for pipe, names in PIPES.items():
        found[pipe] = sum(executed[name] for name in names.split()) / elements
    return {name: round(value, 2) for name, value in found.items()}


def moved_by(modifiers: str) -> int:
    """Return the bytes of a load or store of global memory: what follows its name says so, and nothing means 4."""
    size = re.match(r"[.\w]*?\.(?:[US](8|16)|(64|128))\b", modifiers)
    return int(size[1] or size[2]) // 8 if size else 4
