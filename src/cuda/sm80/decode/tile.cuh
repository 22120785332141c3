// The part of a state that a thread of the decode kernel has, as the words of memory.
#pragma once

#include "cuda/device/words.cuh"
#include "cuda/sm80/decode/config.cuh"

namespace flashqla::cuda::sm80 {

// Which lane of its block a thread is, and what follows for the keys and columns it has.
template <class Config>
struct DecodeLane {
    int lane, warp, k, v;  // k: among those that share a column; v: among those that share a key

    __device__ __forceinline__ DecodeLane()
        : lane(static_cast<int>(threadIdx.x) % 32),
          warp(Config::kWarps > 1 ? static_cast<int>(threadIdx.x) / 32 : 0),
          k(Config::kVFirst ? lane % Config::kLanesK : lane / Config::kLanesV),
          v(Config::kVFirst ? lane / Config::kLanesK : lane % Config::kLanesV) {}

    // The key of its i-th number in a column.
    __device__ __forceinline__ int key(int i) const {
        if constexpr (Config::kVFirst) {
            return (i / Config::kVec * Config::kLanesK + k) * Config::kVec + i % Config::kVec;
        } else {
            return (warp * Config::kLanesK + k) * Config::kKeys + i;
        }
    }
    // Its first column, and the first of those that it finishes, counted from the strip's.
    __device__ __forceinline__ int column() const { return v * Config::kColumns; }
    __device__ __forceinline__ int mine() const {
        return Config::kVFirst ? column() + k % Config::kColumns : lane * Config::kMine;
    }
    // Whether it stores o of its c-th own column; other threads have the same sums.
    __device__ __forceinline__ bool stores(int c) const {
        return Config::kVFirst ? k < Config::kColumns : warp == c % Config::kWarps;
    }
};

template <class Config>
struct DecodeTile {
    using State = typename Config::State;
    Words<State> words[Config::kWords];  // vk: [kColumns, kWordsInRow]; kv: [kKeys]

    // The i-th key of column c.
    __device__ __forceinline__ float get(int c, int i) const {
        if constexpr (Config::kVFirst) {
            return words[c * Config::kWordsInRow + i / Config::kVec].get(i % Config::kVec);
        } else {
            return words[i].get(c);
        }
    }

    // Where a lane's first number lies in its state, and the w-th word from there.
    // NOTE: a state has at most 256 x 512 elements, so 32 bits hold every offset inside one.
    static __device__ __forceinline__ int first(const DecodeLane<Config>& at, int v0, int dim_v) {
        return Config::kVFirst ? (v0 + at.column()) * Config::kK + at.key(0) : at.key(0) * dim_v + v0 + at.column();
    }
    static __device__ __forceinline__ int offset(int w, int dim_v) {
        if constexpr (Config::kVFirst) {
            return w / Config::kWordsInRow * Config::kK + w % Config::kWordsInRow * Config::kLanesK * Config::kVec;
        } else {
            return w * dim_v;
        }
    }

    __device__ __forceinline__ void load(const State* from, int dim_v) {
#pragma unroll
        for (int w = 0; w < Config::kWords; ++w) words[w].load(from + offset(w, dim_v));
    }
    __device__ __forceinline__ void zero() {
#pragma unroll
        for (int w = 0; w < Config::kWords; ++w) words[w].zero();
    }

    // Makes the compiler take the words for other ones, so that it unpacks them a second time and does not keep what it
    // unpacked the first time: in twice the registers. `zero` is 0 in a way that it cannot know.
    __device__ __forceinline__ void forget(std::uint32_t zero) {
        if constexpr (sizeof(State) < sizeof(float)) {
#pragma unroll
            for (int w = 0; w < Config::kWords; ++w)
#pragma unroll
                for (int i = 0; i < 4; ++i) words[w].w[i] ^= zero;
        }
    }

    // S <- decay S + k delta^T, each word to memory as soon as it is ready.
    __device__ __forceinline__ void update(const float (&k)[Config::kKeys], const float (&delta)[Config::kColumns],
                                           float decay, State* to, int dim_v) {
#pragma unroll
        for (int w = 0; w < Config::kWords; ++w) {
#pragma unroll
            for (int j = 0; j < Config::kVec; j += 2) {
                float s[2];
#pragma unroll
                for (int e = 0; e < 2; ++e) {
                    const int i = Config::kVFirst ? w % Config::kWordsInRow * Config::kVec + j + e : w;
                    const int c = Config::kVFirst ? w / Config::kWordsInRow : j + e;
                    s[e] = fmaf(k[i], delta[c], decay * words[w].get(j + e));
                }
                words[w].set(j, s[0], s[1]);
            }
            words[w].store(to + offset(w, dim_v));
        }
    }
};

}  // namespace flashqla::cuda::sm80
