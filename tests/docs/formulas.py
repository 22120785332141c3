#!/usr/bin/env python3
"""Checks every formula of docs/math.md in double precision against the token recurrence.

Gradients are compared with complex steps of the recurrence: f'(x) = imag f(x + ih) / h, exact to rounding because nothing is
subtracted. Needs numpy.
"""

import sys

import numpy as np

EPS = 1e-6  # of the l2 norm
SMALLEST_LAG = 2.0**-20


# ------------------------------------------------------------------------------------------------ the recurrence
def recurrence(q, k, v, g, beta, S, scale):
    """The rule: q, k [T,K], v [T,V], g, beta [T], S [K,V]. Returns o [T,V] and the state after the last token."""
    o = []
    for t in range(len(g)):
        S = np.exp(g[t]) * S
        d = beta[t] * (v[t] - S.T @ k[t])
        S = S + np.outer(k[t], d)
        o.append(scale * (S.T @ q[t]))
    return np.array(o), S


def one_token(q, k, v, g, beta, S, scale):
    """One token: both reads of the state come before the update."""
    a, q = np.exp(g), scale * q
    u, r = S.T @ k, S.T @ q
    d = beta * (v - a * u)
    return a * r + (k @ q) * d, a * S + np.outer(k, d)


def normalise(x):
    n = 1.0 / np.sqrt((x * x).sum(-1) + EPS)
    return n, n[:, None] * x


def raw_gate(x, A_log, bias):
    return -np.exp(A_log) * np.log1p(np.exp(x + bias))


def sigmoid(x):
    return 1.0 / (1.0 + np.exp(-x))


# ------------------------------------------------------------------------------------------------------ the chunk
class Chunk:
    """The chunk: what both directions need. Kh and Qh hold norms, Qh also the scale."""

    def __init__(self, Kh, Qh, g, beta):
        gamma = np.cumsum(g)
        i, j = np.indices((len(g), len(g)))
        self.Kh, self.Qh, self.beta = Kh, Qh, beta
        self.e, self.r, self.total = np.exp(gamma), np.exp(gamma[-1] - gamma), np.exp(gamma[-1])
        self.Gamma = np.where(i >= j, np.exp(np.where(i >= j, gamma[:, None] - gamma[None, :], 0.0)), 0.0)
        self.KK, self.QK = Kh @ Kh.T, Qh @ Kh.T
        self.L = np.tril(beta[:, None] * self.Gamma * self.KK, -1)
        self.P = np.tril(self.Gamma * self.QK)

    def deltas(self, V, U):
        """X of (I + L) X = beta (V - e U), row by row."""
        X = self.beta[:, None] * (V - self.e[:, None] * U)
        for i in range(len(X)):
            X[i] -= self.L[i, :i] @ X[:i]
        return X

    def back_substitute(self, X1):
        """W' of (I + L)^T W' = X', from the last row up."""
        W = X1.copy()
        for j in reversed(range(len(W))):
            W[j] -= self.L[j + 1 :, j] @ W[j + 1 :]
        return W


def chunks_of(T, C):
    return [slice(t, min(t + C, T)) for t in range(0, T, C)]


def forward(Kh, Qh, v, g, beta, S, C):
    O, states = np.zeros_like(v), []
    for c in chunks_of(len(g), C):
        chunk = Chunk(Kh[c], Qh[c], g[c], beta[c])
        states.append(S)
        X = chunk.deltas(v[c], chunk.Kh @ S)
        O[c] = chunk.e[:, None] * (chunk.Qh @ S) + chunk.P @ X
        S = chunk.total * S + chunk.Kh.T @ (chunk.r[:, None] * X)
    return O, S, states


def forward_with_lag(Kh, Qh, v, g, beta, S, C):
    """Delayed decay: the state is kept divided by the scalar lag."""
    O, stored, lag, folds = np.zeros_like(v), S, 1.0, 0
    for c in chunks_of(len(g), C):
        chunk = Chunk(Kh[c], Qh[c], g[c], beta[c])
        X = chunk.deltas(v[c], lag * (chunk.Kh @ stored))
        O[c] = lag * chunk.e[:, None] * (chunk.Qh @ stored) + chunk.P @ X
        entering = lag * chunk.total
        fold = entering < SMALLEST_LAG
        folds += fold
        add = chunk.Kh.T @ (chunk.r[:, None] * X)
        stored = entering * stored + add if fold else stored + add / entering
        lag = 1.0 if fold else entering
    return O, lag * stored, folds


def transition(Kh, g, beta, C):
    """Segments: M is what the values-free recurrence makes of the identity."""
    K = Kh.shape[1]
    return forward(Kh, np.zeros_like(Kh), np.zeros((len(g), K)), g, beta, np.eye(K), C)[1]


def backward(Kh, Qh, v, g, beta, S0, dO, D, C):
    """Gradients, with respect to Kh, Qh, v, g, beta and the initial state."""
    _, _, states = forward(Kh, Qh, v, g, beta, S0, C)
    dQ, dK, dV, dg, dbeta = (np.zeros_like(x) for x in (Qh, Kh, v, g, beta))
    for c, S in reversed(list(zip(chunks_of(len(g), C), states))):
        x = Chunk(Kh[c], Qh[c], g[c], beta[c])
        e, r, b = x.e[:, None], x.r[:, None], x.beta[:, None]
        U = x.Kh @ S
        R = v[c] - e * U
        X = x.deltas(v[c], U)
        from_state = r * (x.Kh @ D)
        W1 = x.back_substitute(x.P.T @ dO[c] + from_state)
        U1 = -b * e * W1
        GP1 = x.Gamma * np.tril(dO[c] @ X.T)
        GL1 = -x.Gamma * np.tril(W1 @ X.T, -1)
        Z = b * GL1
        dO_S = e * (dO[c] @ S.T)
        dV[c] = b * W1
        dQ[c] = dO_S + GP1 @ x.Kh
        dK[c] = U1 @ S.T + r * (X @ D.T) + GP1.T @ x.Qh + (Z + Z.T) @ x.Kh
        dbeta[c] = (W1 * R).sum(1) + (GL1 * x.KK).sum(1)
        gain = np.tril(GP1 * x.QK, -1) + Z * x.KK
        end = (X * from_state).sum(1)
        d_gamma = (U1 * U).sum(1) + (x.Qh * dO_S).sum(1) + gain.sum(1) - gain.sum(0) - end
        d_gamma[-1] += end.sum() + x.total * (D * S).sum()
        dg[c] = np.cumsum(d_gamma[::-1])[::-1]
        D = x.total * D + x.Kh.T @ U1 + x.Qh.T @ (e * dO[c])
    return dQ, dK, dV, dg, dbeta, D


# ----------------------------------------------------------------------------------------------------- the checks
def complex_step(f, x):
    h, result = 1e-200, np.zeros_like(x)
    for at in np.ndindex(x.shape):
        moved = x.astype(complex)
        moved[at] += 1j * h
        result[at] = f(moved).imag / h
    return result


class Checks:
    def __init__(self):
        self.failed = 0

    def equal(self, what, found, expected, limit=1e-12):
        error = np.linalg.norm(found - expected) / max(np.linalg.norm(expected), 1e-300)
        self.failed += not error <= limit
        print(f"{'ok  ' if error <= limit else 'FAIL'} {error:8.1e}  {what}")


def run(check, name, T, C, K, V, gates):
    random = np.random.default_rng(7)
    q, k, v = random.normal(size=(T, K)), random.normal(size=(T, K)), random.normal(size=(T, V))
    a, b = gates(random, T), random.normal(size=T)
    A_log, bias, scale = 0.3, -0.2, K**-0.5
    S0, dO, dS = random.normal(size=(K, V)), random.normal(size=(T, V)), random.normal(size=(K, V))

    def layer(q, k, v, a, b, A_log, bias, S0):
        return recurrence(normalise(q)[1], normalise(k)[1], v, raw_gate(a, A_log, bias), sigmoid(b), S0, scale)

    def loss(*args):
        o, S = layer(*args)
        return (dO * o).sum() + (dS * S).sum()

    arguments = [q, k, v, a, b, np.array(A_log), np.array(bias), S0]
    o, S = layer(*arguments)
    (nq, qh), (nk, kh) = normalise(q), normalise(k)
    g, beta = raw_gate(a, A_log, bias), sigmoid(b)

    once, after = one_token(qh[0], kh[0], v[0], g[0], beta[0], S0, scale)
    o1, S1 = recurrence(qh[:1], kh[:1], v[:1], g[:1], beta[:1], S0, scale)
    check.equal(f"{name}: one token, output", once, o1[0])
    check.equal(f"{name}: one token, state", after, S1)

    O, S_end, _ = forward(kh, scale * qh, v, g, beta, S0, C)
    check.equal(f"{name}: chunk, output", O, o)
    check.equal(f"{name}: chunk, state", S_end, S)
    O, S_end, folds = forward_with_lag(kh, scale * qh, v, g, beta, S0, C)
    check.equal(f"{name}: delayed decay, output ({folds} folds)", O, o)
    check.equal(f"{name}: delayed decay, state", S_end, S)

    # Three segments, each end state from its own transition and the state it would reach from zero.
    carry = S0
    for part in np.array_split(np.arange(T), 3):
        star = forward(kh[part], qh[part], v[part], g[part], beta[part], np.zeros((K, V)), C)[1]
        carry = star + transition(kh[part], g[part], beta[part], C) @ carry
    check.equal(f"{name}: segments, state", carry, S)

    dQ, dK, dV, dg, dbeta, D0 = backward(kh, scale * qh, v, g, beta, S0, dO, dS, C)
    M = transition(kh, g, beta, C)
    D_star = backward(kh, scale * qh, v, g, beta, S0, dO, np.zeros((K, V)), C)[5]
    check.equal(f"{name}: gradient of the state through M^T", D_star + M.T @ dS, D0)

    d_x = -np.exp(A_log) * sigmoid(a + bias) * dg
    found = {
        "d_q": scale * nq[:, None] * (dQ - qh * (qh * dQ).sum(1, keepdims=True)),
        "d_k": nk[:, None] * (dK - kh * (kh * dK).sum(1, keepdims=True)),
        "d_v": dV,
        "d_g": d_x,
        "d_beta": dbeta * beta * (1 - beta),
        "d_A_log": np.array((dg * g).sum()),
        "d_dt_bias": np.array(d_x.sum()),
        "d_initial_state": D0,
    }
    for at, (gradient, value) in enumerate(found.items()):
        expected = complex_step(lambda x: loss(*arguments[:at], x, *arguments[at + 1 :]), arguments[at])
        check.equal(f"{name}: {gradient}", value, expected, 1e-11)


def main():
    check = Checks()
    run(check, "typical gates", T=45, C=16, K=8, V=6, gates=lambda r, T: r.normal(size=T))
    run(check, "weak gates", T=33, C=8, K=6, V=9, gates=lambda r, T: r.normal(size=T) - 6.0)
    run(check, "strong gates", T=40, C=16, K=8, V=6, gates=lambda r, T: r.normal(size=T) + 2.0)
    print("docs/math.md: all formulas hold" if check.failed == 0 else f"{check.failed} checks failed")
    return 1 if check.failed else 0


if __name__ == "__main__":
    sys.exit(main())
