"""The kernel of `dpcore_triton.step`."""
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls

from __future__ import annotations

import triton.language as tl

from dpcore_triton.correlate import correlated_elements, ring_elements
from dpcore_triton.filter import pointers, recurrence_elements
from dpcore_triton.grid import nearest
from dpcore_triton.launch import jit, kernel
from dpcore_triton.noise import normals
from dpcore_triton.step_numbers import FIRST_WIDE, WIDE
from dpcore_triton.stream import LANES, counters, interior, load_at, locate, places, store_at
from dpcore_triton.update import UPDATE_NUMBERS, scalars, settings_of, update_elements

# Elements of a thread that are loaded together: the largest of 4, 2 and 1 for which, with the normals, the registers
# suffice.
MOST_LOADED = tl.constexpr(52)

# The constants of the noise and of the square's noise.
CIPHER = ("k0", "k1", "k2", "k3", "k4", "k5", "k6", "k7", "noise_stream", "one")
SQUARE_CIPHER = ("s0", "s1", "s2", "s3", "s4", "s5", "s6", "s7", "square_stream", "square_one")


@kernel(*CIPHER, *SQUARE_CIPHER)
def step_kernel(
    rows, row_of, numbers, law, k0, k1, k2, k3, k4, k5, k6, k7, noise_stream, one,
    s0, s1, s2, s3, s4, s5, s6, s7, square_stream, square_one,
    RULE: tl.constexpr, RNG: tl.constexpr, NOISE_TAPS: tl.constexpr, NOISE_NB: tl.constexpr, NOISE_ORDER: tl.constexpr,
    RING: tl.constexpr, RING_ORDER: tl.constexpr, SCALED: tl.constexpr, TAPS: tl.constexpr, FILTERS: tl.constexpr,
    ORDER: tl.constexpr, SQUARE: tl.constexpr, SQUARE_RNG: tl.constexpr,
    MOMENTS: tl.constexpr, GENERAL: tl.constexpr, DISPLACED: tl.constexpr, BLOCKS: tl.constexpr,
):  # fmt: skip
    """Draw the noise of a program's elements, then take their step.

    Values that change from step to step are read from `numbers`, which `dpcore_triton.step_numbers` fills.
    """
    row, start = locate(rows, row_of, 9 + RING_ORDER + NOISE_ORDER + ORDER + MOMENTS, BLOCKS)
    z_square, z = None, None
    if SQUARE_RNG is not None:
        square_cipher = (s0, s1, s2, s3, s4, s5, s6, s7, tl.load(numbers + 1), square_stream, square_one)
        z_square = normals(square_cipher, counters(row, start, BLOCKS), law, tl.load(numbers + 3), SQUARE_RNG)
    if RNG is not None:
        cipher = (k0, k1, k2, k3, k4, k5, k6, k7, tl.load(numbers), noise_stream, one)
        z = normals(cipher, counters(row, start, BLOCKS), law, tl.load(numbers + 2), RNG)
    place, low, high, origin = places(row, start, BLOCKS)
    total = tl.load(row + 4).to(tl.pointer_type(tl.float64)) + (origin + place)
    displacement, scale_and_square = pointers(row, origin + place, 6, 1), pointers(row, origin + place, 7, 2)
    states = pointers(row, origin + place, 5, 1)
    states += pointers(row, origin + place, 9 + RING_ORDER, NOISE_ORDER, tl.float64)
    states += pointers(row, origin + place, 9 + RING_ORDER + NOISE_ORDER, ORDER + MOMENTS)
    arrays = (total, states, scale_and_square, displacement)
    wide = (numbers + WIDE).to(tl.pointer_type(tl.float64), bitcast=True)
    correlation = wide + FIRST_WIDE
    after: tl.constexpr = WIDE + 2 * (FIRST_WIDE + 3 + NOISE_TAPS)
    first_tap = (numbers + after).to(tl.pointer_type(tl.float32), bitcast=True)
    noise_taps = ()
    if NOISE_NB > 0:
        noise_taps = scalars(correlation, 3 + NOISE_TAPS)
    taps = scalars(first_tap, TAPS)
    settings = settings_of(first_tap + TAPS + tl.load(row + 3) * UPDATE_NUMBERS)
    ring = (row + 9, origin + place, tl.load(numbers + 4))
    read = (scalars(wide, FIRST_WIDE), noise_taps, taps, settings)
    if interior(low, high, BLOCKS):
        step_words(
            z, z_square, arrays, ring, correlation, place, low, high, read, RING_ORDER, RING,
            RULE, NOISE_NB, NOISE_ORDER, SCALED, FILTERS, ORDER, SQUARE, GENERAL, DISPLACED, False,
        )  # fmt: skip
    else:
        step_words(
            z, z_square, arrays, ring, correlation, place, low, high, read, RING_ORDER, RING,
            RULE, NOISE_NB, NOISE_ORDER, SCALED, FILTERS, ORDER, SQUARE, GENERAL, DISPLACED, True,
        )  # fmt: skip


@jit
def step_words(
    z, z_square, arrays, ring, correlation, place, low, high, numbers, RING_ORDER: tl.constexpr, RING: tl.constexpr,
    RULE: tl.constexpr, NOISE_NB: tl.constexpr, NOISE_ORDER: tl.constexpr, SCALED: tl.constexpr, FILTERS: tl.constexpr,
    ORDER: tl.constexpr, SQUARE: tl.constexpr, GENERAL: tl.constexpr, DISPLACED: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """Step the 16 elements of each block, in groups whose loads travel together.

    Pointers come from integers, so the compiler moves no load across a store: all of a group's loads come before its
    stores. Inside of a tensor nothing is masked.
    """
    if RING is not None:
        z = ring_elements(z, ring[0], ring[1], place, low, high, correlation, ring[2], RING_ORDER, RING, MASKED)
    states = arrays[1]
    reads = (arrays[0],) + states  # noqa: RUF005 - Triton knows no starred expression
    if SCALED:
        reads += arrays[2][:1]
    if SQUARE == "given":
        reads += arrays[2][1:]
    normal_registers: tl.constexpr = 32 * ((z is not None) + (z_square is not None))
    each: tl.constexpr = 1 + len(reads)
    group: tl.constexpr = (
        4 if normal_registers + 4 * each <= MOST_LOADED else 2 if normal_registers + 2 * each <= MOST_LOADED else 1
    )
    for first in tl.static_range(0, 16, group):
        read = ()
        for k in tl.static_range(group):
            shift = (first + k) * LANES
            read += (load_each(reads, shift, place, low, high, MASKED),)  # type: ignore[assignment]
        for k in tl.static_range(group):
            shift = (first + k) * LANES
            after = step_elements(
                None if z is None else z[first + k], None if z_square is None else z_square[first + k],
                read[k], len(states), numbers,
                RULE, NOISE_NB, NOISE_ORDER, SCALED, FILTERS, ORDER, SQUARE, GENERAL,
            )  # fmt: skip
            store_each(states, after, shift, place, low, high, MASKED)
            if DISPLACED:
                moved = after[0] - read[k][1]
                store_at(arrays[3][0] + shift, moved, place + shift, low, high, MASKED)


@jit
def load_each(pointers_, shift, place, low, high, MASKED: tl.constexpr):
    """Return the elements `shift` after the pointers."""
    values = ()
    for k in tl.static_range(len(pointers_)):
        values += (load_at(pointers_[k] + shift, place + shift, low, high, MASKED),)  # type: ignore[assignment]
    return values


@jit
def store_each(pointers_, values, shift, place, low, high, MASKED: tl.constexpr):
    """Store elements `shift` after the pointers."""
    for k in tl.static_range(len(pointers_)):
        store_at(pointers_[k] + shift, values[k], place + shift, low, high, MASKED)


@jit
def step_elements(
    z, z_square, read, STATES: tl.constexpr, numbers,
    RULE: tl.constexpr, NOISE_NB: tl.constexpr, NOISE_ORDER: tl.constexpr, SCALED: tl.constexpr, FILTERS: tl.constexpr,
    ORDER: tl.constexpr, SQUARE: tl.constexpr, GENERAL: tl.constexpr,
):  # fmt: skip
    """Return the new parameter and states, given the total, the old ones, and a scale and a square if there are any."""
    total, states = read[0], read[1 : 1 + STATES]
    wide, noise_taps, taps, settings = numbers[0], numbers[1], numbers[2], numbers[3]
    integers, kept = total, states[1 : 1 + NOISE_ORDER]
    if z is not None:
        m = z
        if NOISE_NB > 0:
            found = correlated_elements(z, kept, noise_taps, NOISE_NB)
            m, kept = found[0], found[1:]
        integers = m + total
    g = (integers * wide[0]).to(tl.float32)
    if SCALED:
        g = tl.div_rn(g, read[1 + STATES])
    y = g
    for k in tl.static_range(len(FILTERS)):
        own = states[1 + NOISE_ORDER + FILTERS[k][3] : 1 + NOISE_ORDER + FILTERS[k][4]]
        found = recurrence_elements(y, own, taps[FILTERS[k][0] : FILTERS[k][1]], FILTERS[k][2])
        y = found[0]
        kept += found[1:]
    h = None
    if SQUARE == "released":
        h = g * g
    elif SQUARE == "given":
        h = read[1 + STATES + SCALED]
    elif SQUARE == "separate":
        q = total * wide[0]
        if SCALED:
            q = q / read[1 + STATES].to(tl.float64)
        h = q * q
        if z_square is not None:
            h = (nearest(h * wide[1]) + z_square) * wide[2]
        h = h.to(tl.float32)
    moved = update_elements(RULE, states[0], y, h, states[1 + NOISE_ORDER + ORDER :], settings, GENERAL)
    return moved[:1] + kept + moved[1:]
