#!/usr/bin/env python3
"""Makes the polynomials of src/backend/simd/math.rs: minimax fits of exp and tanh by reweighted least squares.

Prints the coefficients as f32, high first, and the largest relative error before rounding. Needs numpy.
"""
import numpy as np


def minimax(basis, target, weight, rounds=300):
    """Coefficients that minimise max |weight * (basis @ c - target)|: Lawson's reweighting."""
    share = np.full(len(target), 1 / len(target))
    for _ in range(rounds):
        root = weight * np.sqrt(share)
        coefficients = np.linalg.lstsq(basis * root[:, None], target * root, rcond=None)[0]
        error = np.abs((basis @ coefficients - target) * weight)
        share *= error
        share /= share.sum()
    return coefficients, error.max()


def report(name, coefficients, error):
    print(name, [float(c) for c in coefficients[::-1].astype(np.float32)], f"relative error {error:.1e}")


def main():
    # exp(r) = 1 + r + r^2 * q(r); the range reduction may overshoot ln(2) / 2 by a rounding.
    half = np.log(2) / 2 * 1.0005
    r = np.cos(np.linspace(0, np.pi, 4000)) * half
    basis = np.stack([r ** (2 + i) for i in range(5)], axis=1)
    report("EXP", *minimax(basis, np.expm1(r) - r, 1 / np.exp(r)))
    # tanh(z) = z + z^3 * q(z^2)
    z = np.linspace(1e-3, 0.625, 8001)
    basis = np.stack([z ** (3 + 2 * i) for i in range(5)], axis=1)
    report("TANH", *minimax(basis, np.tanh(z) - z, 1 / np.tanh(z)))


if __name__ == "__main__":
    main()
