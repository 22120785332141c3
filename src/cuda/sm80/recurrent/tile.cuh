// The tile of a state that a block holds in registers, and its way from and to memory.
#pragma once

#include <cstdint>

#include "base/call.hpp"
#include "cuda/device/memory.cuh"
#include "cuda/sm80/recurrent/config.cuh"

namespace flashqla::cuda::sm80 {

template <class Config>
struct Tile {
    float s[Config::kGroups][4];  // S[k,v]; group g is row(g), column() + 0..3 of the tile as it lies in memory

    // Row of group g: a column of V (vk) or a key (kv), counted from the tile's begin.
    static __device__ __forceinline__ int row(int g) {
        const int thread = static_cast<int>(threadIdx.x);
        if constexpr (Config::kVFirst) return thread / Config::kLanes * Config::kRows + g / Config::kGroupsK;
        return thread / Config::kLanesV + Config::kLines * g;
    }
    // Where the four elements of group g begin in their row: a key (vk) or a column of V (kv).
    static __device__ __forceinline__ int begin(int g) {
        const int thread = static_cast<int>(threadIdx.x);
        if constexpr (Config::kVFirst) return 4 * (thread % Config::kLanes + Config::kLanes * (g % Config::kGroupsK));
        return 4 * (thread % Config::kLanesV);
    }

    __device__ __forceinline__ void zero() {
#pragma unroll
        for (int g = 0; g < Config::kGroups; ++g)
#pragma unroll
            for (int j = 0; j < 4; ++j) s[g][j] = 0.0f;
    }

    // Columns v0.. of state (state_row, head), `step` elements further; elements outside the state become zero.
    __device__ __forceinline__ void load(const StateRef& from, const Problem& p, std::int64_t state_row,
                                         std::int32_t head, int v0, std::int64_t step = 0) {
        with_type(from.dtype, from.data, [&]<class T>(T* data) {
            const Place place(p, v0);
            const T* base = data + from.offset(state_row, head) + step + place.first;
            if (place.fours && fours_are_aligned(base)) {
#pragma unroll
                for (int g = 0; g < Config::kGroups; ++g) {
                    if (place.has(g, 0)) {
                        load_four(base + place.at(g), s[g]);
                    } else {
#pragma unroll
                        for (int j = 0; j < 4; ++j) s[g][j] = 0.0f;
                    }
                }
                return;
            }
#pragma unroll
            for (int g = 0; g < Config::kGroups; ++g)
#pragma unroll
                for (int j = 0; j < 4; ++j) s[g][j] = place.has(g, j) ? to_float(base[place.at(g) + j]) : 0.0f;
        });
    }

    __device__ __forceinline__ void store(const StateRef& to, const Problem& p, std::int64_t state_row,
                                          std::int32_t head, int v0, std::int64_t step = 0) const {
        with_type(to.dtype, to.data, [&]<class T>(T* data) {
            const Place place(p, v0);
            T* base = data + to.offset(state_row, head) + step + place.first;
            if (place.fours && fours_are_aligned(base)) {
#pragma unroll
                for (int g = 0; g < Config::kGroups; ++g)
                    if (place.has(g, 0)) store_four(base + place.at(g), s[g]);
                return;
            }
#pragma unroll
            for (int g = 0; g < Config::kGroups; ++g)
#pragma unroll
                for (int j = 0; j < 4; ++j)
                    if (place.has(g, j)) base[place.at(g) + j] = from_float<T>(s[g][j]);
        });
    }

private:
    // The tile within its state: rows of `width` elements, `rows` and `columns` of them left from the tile's begin.
    struct Place {
        int width, rows, columns, first;
        bool fours;  // whole groups of four, all or none of their elements inside

        __device__ __forceinline__ Place(const Problem& p, int v0) {
            width = Config::kVFirst ? p.dim_k : p.dim_v;
            rows = Config::kVFirst ? p.dim_v - v0 : p.dim_k;
            columns = Config::kVFirst ? p.dim_k : p.dim_v - v0;
            first = Config::kVFirst ? v0 * p.dim_k : v0;
            fours = width % 4 == 0;
            // NOTE: the compiler would keep the offsets and bounds of every group in registers from one load or store
            // to the next, across the loop over tokens, and spill. This hides that they are the same each time.
            asm volatile("" : "+r"(width), "+r"(rows), "+r"(columns));
        }
        // NOTE: a state has at most 256 x 512 elements, so 32 bits hold every offset inside one.
        __device__ __forceinline__ int at(int g) const { return row(g) * width + begin(g); }
        __device__ __forceinline__ bool has(int g, int j) const { return row(g) < rows && begin(g) + j < columns; }
    };
};

}  // namespace flashqla::cuda::sm80
