// The chunked form of the rule in double, for one sequence of one value head, written from the algebra and sharing
// nothing with the token recurrence that it is compared with. Gates enter as natural logs, beta as it is used.
//
// For a chunk of C tokens: gamma running sum of g, e = exp(gamma), rho = exp(gamma_last - gamma), e_last, B =
// diag(beta) and Gamma[i,j] = exp(gamma_i - gamma_j) on and below the diagonal. The inverse
//   A = (I + stril(B K K^T))^-1                                    [C,C]
// contains no gate: Gamma is a diagonal similarity, so (I + stril(B (Gamma o K K^T)))^-1 = Gamma o A.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <vector>

namespace flashqla::test {

struct Matrix {
    std::int64_t rows = 0, cols = 0;
    std::vector<double> x;

    Matrix() = default;
    Matrix(std::int64_t r, std::int64_t c) : rows(r), cols(c), x(static_cast<std::size_t>(r * c), 0.0) {}
    double& operator()(std::int64_t i, std::int64_t j) { return x[static_cast<std::size_t>(i * cols + j)]; }
    double operator()(std::int64_t i, std::int64_t j) const { return x[static_cast<std::size_t>(i * cols + j)]; }

    template <class F>
    static Matrix make(std::int64_t r, std::int64_t c, F f) {
        Matrix m(r, c);
        for (std::int64_t i = 0; i < r; ++i) {
            for (std::int64_t j = 0; j < c; ++j) m(i, j) = f(i, j);
        }
        return m;
    }
    Matrix slice(std::int64_t begin, std::int64_t end) const {
        return make(end - begin, cols, [&](auto i, auto j) { return (*this)(begin + i, j); });
    }
    void paste(std::int64_t begin, const Matrix& m) { std::copy(m.x.begin(), m.x.end(), x.begin() + begin * cols); }
};

inline Matrix operator*(const Matrix& a, const Matrix& b) {
    Matrix c(a.rows, b.cols);
    for (std::int64_t i = 0; i < a.rows; ++i) {
        for (std::int64_t l = 0; l < a.cols; ++l) {
            for (std::int64_t j = 0; j < b.cols; ++j) c(i, j) += a(i, l) * b(l, j);
        }
    }
    return c;
}
inline Matrix combine(double a, const Matrix& x, double b, const Matrix& y) {
    return Matrix::make(x.rows, x.cols, [&](auto i, auto j) { return a * x(i, j) + b * y(i, j); });
}
inline Matrix operator+(const Matrix& x, const Matrix& y) { return combine(1, x, 1, y); }
inline Matrix operator-(const Matrix& x, const Matrix& y) { return combine(1, x, -1, y); }
inline Matrix operator*(double a, const Matrix& x) { return combine(a, x, 0, x); }
inline Matrix transposed(const Matrix& a) {
    return Matrix::make(a.cols, a.rows, [&](auto i, auto j) { return a(j, i); });
}
inline Matrix times(const Matrix& a, const Matrix& b) {  // elementwise
    return Matrix::make(a.rows, a.cols, [&](auto i, auto j) { return a(i, j) * b(i, j); });
}
inline Matrix scale_rows(const std::vector<double>& s, const Matrix& a) {
    return Matrix::make(a.rows, a.cols, [&](auto i, auto j) { return s[i] * a(i, j); });
}
inline Matrix scale_cols(const Matrix& a, const std::vector<double>& s) {
    return Matrix::make(a.rows, a.cols, [&](auto i, auto j) { return a(i, j) * s[j]; });
}
// Keeps i > j (strict) or i >= j.
inline Matrix lower(const Matrix& a, bool strict) {
    return Matrix::make(a.rows, a.cols, [&](auto i, auto j) { return i > j || (i == j && !strict) ? a(i, j) : 0.0; });
}
inline Matrix identity(std::int64_t n) {
    return Matrix::make(n, n, [](auto i, auto j) { return i == j ? 1.0 : 0.0; });
}
inline std::vector<double> row_sums(const Matrix& a) {
    std::vector<double> s(static_cast<std::size_t>(a.rows), 0.0);
    for (std::int64_t i = 0; i < a.rows; ++i) {
        for (std::int64_t j = 0; j < a.cols; ++j) s[i] += a(i, j);
    }
    return s;
}

// Inverse of a unit lower triangular matrix by forward substitution.
inline Matrix unit_lower_inverse(const Matrix& L) {
    Matrix A = identity(L.rows);
    for (std::int64_t i = 0; i < L.rows; ++i) {
        for (std::int64_t l = 0; l < i; ++l) {
            for (std::int64_t j = 0; j <= l; ++j) A(i, j) -= L(i, l) * A(l, j);
        }
    }
    return A;
}

struct ChunkedInputs {
    Matrix Q, K, V;               // [T,K] [T,K] [T,V]
    std::vector<double> g, beta;  // [T]
    Matrix S0;                    // [K,V]
    double scale = 1.0;
};

// What every form below needs of one chunk.
struct Chunk {
    Matrix Q, K, V;                           // [C,K] [C,K] [C,V]
    std::vector<double> beta, gamma, e, rho;  // [C]
    double e_last = 1.0;
    Matrix KK, Gamma, A;  // [C,C]

    Chunk(const ChunkedInputs& in, std::int64_t begin, std::int64_t end)
        : Q(in.Q.slice(begin, end)),
          K(in.K.slice(begin, end)),
          V(in.V.slice(begin, end)),
          beta(in.beta.begin() + begin, in.beta.begin() + end),
          gamma(in.g.begin() + begin, in.g.begin() + end) {
        const std::int64_t C = end - begin;
        for (std::int64_t i = 1; i < C; ++i) gamma[i] += gamma[i - 1];
        for (double x : gamma) {
            e.push_back(std::exp(x));
            rho.push_back(std::exp(gamma.back() - x));
        }
        e_last = e.back();
        KK = K * transposed(K);
        Gamma = Matrix::make(C, C, [&](auto i, auto j) { return i >= j ? std::exp(gamma[i] - gamma[j]) : 0.0; });
        A = unit_lower_inverse(identity(C) + lower(scale_rows(beta, KK), true));
    }
    std::int64_t size() const { return K.rows; }
};

struct ChunkedForward {
    Matrix O, S_end;             // [T,V] [K,V]
    std::vector<Matrix> states;  // S entering each chunk
};

//   W = V - e o (K S)      V' = (Gamma o A) B W      P = scale Gamma o (Q K^T)
//   O = scale e o (Q S) + P V'                       S <- e_last S + K^T (rho o V')
inline ChunkedForward chunked_forward(const ChunkedInputs& in, std::int64_t chunk) {
    ChunkedForward out{Matrix(in.V.rows, in.V.cols), in.S0, {}};
    Matrix& S = out.S_end;
    for (std::int64_t begin = 0; begin < in.V.rows; begin += chunk) {
        const Chunk c(in, begin, std::min(begin + chunk, in.V.rows));
        out.states.push_back(S);
        const Matrix W = c.V - scale_rows(c.e, c.K * S);
        const Matrix V1 = scale_cols(times(c.Gamma, c.A), c.beta) * W;
        const Matrix P = in.scale * times(c.Gamma, c.Q * transposed(c.K));
        out.O.paste(begin, in.scale * scale_rows(c.e, c.Q * S) + P * V1);
        S = c.e_last * S + transposed(c.K) * scale_rows(c.rho, V1);
    }
    return out;
}

// The end state without a gated C x C matrix:  X = -B A^T K,  Y = e_last (K S) - rho o V,  S <- e_last S + X^T Y.
inline Matrix state_only(const ChunkedInputs& in, std::int64_t chunk) {
    Matrix S = in.S0;
    for (std::int64_t begin = 0; begin < in.V.rows; begin += chunk) {
        const Chunk c(in, begin, std::min(begin + chunk, in.V.rows));
        const Matrix X = -1.0 * scale_rows(c.beta, transposed(c.A) * c.K);
        const Matrix Y = c.e_last * (c.K * S) - scale_rows(c.rho, c.V);
        S = c.e_last * S + transposed(X) * Y;
    }
    return S;
}

// M [K,K] with  S_end(S0) = S_end(0) + M S0  and, for the gradient of the state,  D_start = D_start(0) + M^T D_end.
inline Matrix transition(const ChunkedInputs& in, std::int64_t chunk) {
    Matrix M = identity(in.K.cols);
    double log_decay = 0.0;
    for (std::int64_t begin = 0; begin < in.V.rows; begin += chunk) {
        const Chunk c(in, begin, std::min(begin + chunk, in.V.rows));
        const Matrix X = -1.0 * scale_rows(c.beta, transposed(c.A) * c.K);
        M = M + transposed(X) * (c.K * M);
        log_decay += c.gamma.back();
    }
    return std::exp(log_decay) * M;
}

// The gradient of the state alone, chunks in reverse:
//   X = A B K      R = scale e o (Q - tril(Q K^T) X)      D <- e_last D + R^T dO - e_last X^T (K D)
inline Matrix state_gradient_only(const ChunkedInputs& in, const Matrix& dO, const Matrix& D_end, std::int64_t chunk) {
    Matrix D = D_end;
    for (std::int64_t begin = (in.V.rows - 1) / chunk * chunk; begin >= 0; begin -= chunk) {
        const std::int64_t end = std::min(begin + chunk, in.V.rows);
        const Chunk c(in, begin, end);
        const Matrix X = scale_cols(c.A, c.beta) * c.K;
        const Matrix R = in.scale * scale_rows(c.e, c.Q - lower(c.Q * transposed(c.K), false) * X);
        D = c.e_last * D + transposed(R) * dO.slice(begin, end) - c.e_last * (transposed(X) * (c.K * D));
    }
    return D;
}

struct ChunkedBackward {
    Matrix dQ, dK, dV, D_start;
    std::vector<double> dg, dbeta;
};

inline ChunkedBackward chunked_backward(const ChunkedInputs& in, const Matrix& dO_all, const Matrix& D_end,
                                        std::int64_t chunk) {
    const std::int64_t T = in.V.rows;
    const std::vector<Matrix> states = chunked_forward(in, chunk).states;
    ChunkedBackward out{Matrix(T, in.K.cols),
                        Matrix(T, in.K.cols),
                        Matrix(T, in.V.cols),
                        D_end,
                        std::vector<double>(static_cast<std::size_t>(T)),
                        std::vector<double>(static_cast<std::size_t>(T))};
    Matrix& D = out.D_start;
    for (std::int64_t begin = (T - 1) / chunk * chunk; begin >= 0; begin -= chunk) {
        const std::int64_t end = std::min(begin + chunk, T);
        const Chunk c(in, begin, end);
        const Matrix& S = states[static_cast<std::size_t>(begin / chunk)];
        const Matrix dO = dO_all.slice(begin, end);
        const double s = in.scale;

        // forward again
        const Matrix U = c.K * S;
        const Matrix W = c.V - scale_rows(c.e, U);
        const Matrix AB = scale_cols(c.A, c.beta);
        const Matrix V1 = times(c.Gamma, AB) * W;
        const Matrix P = s * times(c.Gamma, c.Q * transposed(c.K));

        const Matrix dV1 = scale_rows(c.rho, c.K * D) + transposed(P) * dO;
        const Matrix dV = transposed(times(c.Gamma, AB)) * dV1;
        const Matrix dU = -1.0 * scale_rows(c.e, dV);
        const Matrix dAB = times(c.Gamma, dV1 * transposed(W));  // gradient of A B
        const Matrix dP = dO * transposed(V1);
        const Matrix dQK = s * times(c.Gamma, dP);
        // A = (I + L)^-1 with L = stril(B K K^T), so dL = -A^T dA A^T on L's entries.
        const Matrix dL = -1.0 * lower(transposed(c.A) * scale_cols(dAB, c.beta) * transposed(c.A), true);
        const Matrix BdL = scale_rows(c.beta, dL);
        const Matrix dO_S = s * scale_rows(c.e, dO * transposed(S));
        const Matrix V1_D = scale_rows(c.rho, V1 * transposed(D));

        out.dV.paste(begin, dV);
        out.dQ.paste(begin, dO_S + dQK * c.K);
        out.dK.paste(begin, V1_D + dU * transposed(S) + transposed(dQK) * c.Q + (BdL + transposed(BdL)) * c.K);

        const auto col_A = row_sums(transposed(times(dAB, c.A))), row_L = row_sums(times(dL, c.KK));
        const Matrix Z = times(P, dP) + times(dAB, AB);
        const auto by_state = row_sums(times(dU, U)), by_rho = row_sums(times(c.K, V1_D));
        const auto by_read = row_sums(times(c.Q, dO_S)), by_pairs = row_sums(Z - transposed(Z));
        double tail = 0.0;  // gradient of gamma_last, then the reverse sum that turns d gamma into dg
        for (double x : times(c.e_last * D, S).x) tail += x;
        for (double x : by_rho) tail += x;
        for (std::int64_t i = c.size(); i-- > 0;) {
            tail += by_state[i] - by_rho[i] + by_read[i] + by_pairs[i];
            out.dg[begin + i] = tail;
            out.dbeta[begin + i] = col_A[i] + row_L[i];
        }
        D = c.e_last * D + transposed(c.K) * dU + transposed(c.Q) * (s * scale_rows(c.e, dO));
    }
    return out;
}

}  // namespace flashqla::test
