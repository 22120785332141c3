// Who does what. A block stays and takes one item after another. First, where sequences are cut, those that lead to
// start states:
//
//   ends       128 columns of one value head's state, or of its transition, through the chunks of a segment
//   carries    8 columns of V over the cuts of one sequence and value head          carry.cuh
//   outputs    128 columns of one value head's state through the chunks of a segment
//
// by four warpgroups:
//
//   0, 1   the walk: 64 columns of V each, as 64 rows of S^T in registers             walk.cuh
//   2      the triangles of a chunk, one or two chunks ahead                          triangles.cuh
//   3      two warps: what the walk solves with, made of a triangle                   solver.cuh
//          one warp: takes items, loads q, k and v                                    loader.cuh
//          one warp: gates and norms                                                  gates.cuh
//
// and what they hand to each other.
#pragma once

#include "cuda/device/pipeline.cuh"
#include "cuda/device/ring.cuh"
#include "cuda/device/shared_tile.cuh"
#include "cuda/device/state_walk.cuh"
#include "cuda/device/swizzled_tile.cuh"
#include "cuda/device/token_vector.cuh"
#include "cuda/sm90/forward/params.hpp"

namespace flashqla::cuda::sm90 {

template <class Op_, int kK_>
struct ForwardConfig {
    using Op = Op_;
    static constexpr int kK = kK_;  // keys, the last ones zero when dim_k is smaller
    static constexpr int kChunk = 64, kBlocks = kChunk / 16;
    static constexpr int kColumns = 128;  // of V that a block holds
    static constexpr int kWalkers = 2 * kColumns, kThreads = kWalkers + 256;
    static constexpr int kStages = 3;   // chunks of rows in shared memory
    static constexpr int kFactors = 4;  // of factors
    static constexpr int kTurns = 2;    // of triangles
    static constexpr int kItems = 2;    // that the roles may be at
    static constexpr int kLoaderWarp = kWalkers / 32 + 6;
    static constexpr int kMeeting = 5;         // of those who walk
    static constexpr int kSolversMeeting = 6;  // of the two warps
    static constexpr int kWalkRegisters = 192, kTriangleRegisters = 72, kOtherRegisters = 56;
};

template <class Config>
struct ForwardRows {
    using Op = typename Config::Op;
    SwizzledTile<Op, Config::kChunk, Config::kK> k, q;
    SwizzledTile<Op, Config::kChunk, Config::kColumns> values;
};

// The factors of a chunk's tokens. Norms and scale are folded in where nothing is said; tokens past the end of the
// sequence have read = query = 0 and beta = 0. A state does not decay with every chunk: the walk has it divided by
// `state`, the decay since it was last scaled, which read, query and keep make up for. Decays come as products of two
// that do not exceed 1 unless gates grow: from the end of the 16 tokens before token i to i, and from token j to the
// end of the 16 before a later block.
struct ForwardFactors {
    TokenVector read;         // state e_i n_k,i, with the state before the chunk
    TokenVector query;        // state scale e_i n_q,i, the same
    TokenVector keep;         // r_i n_k,i / state, with that after the chunk
    TokenVector row_k;        // from the block's start to token i, times n_k,i
    TokenVector row_q;        // the same times scale n_q,i
    TokenVector to_block[3];  // from token j to the start of block 1, 2, 3, times n_k,j
    TokenVector high, low;    // running sum of g, an unevaluated sum of two floats
    TokenVector norm_k, norm_q;
    alignas(16) __half2 beta[32];
    float decay;  // of the state that leaves, in the walk's registers; nearly always 1
    float state;  // after the chunk
};

// X = (1 / beta + L)^-1 R, L = Gamma o K^ K^^T, is solved by halves of 32 tokens, whose inverses are put together from
// those of blocks of 16:
//
//   X_01 = [A_0      ] R_01        X_23 = [A_2      ] R_23 + [M_20 M_21] X_01
//          [T_1   A_1]                    [T_3   A_3]        [M_30 M_31]
//
// fp16, whatever the operands are: 11 bits of what is below 2 for unit keys.
struct ForwardTriangles {
    SwizzledTile<F16Operand, 64, 64> solve;  // the blocks of these three, where they are in the whole
    SharedTriangle<F16Operand, 64> lower;    // -L; what is not below the diagonal is anything
};

enum class ForwardWork : std::int32_t {
    state,         // through the chunks of a segment
    carry,         // from place.v0 on, over the cuts of a sequence whose first segment is place.number
    no_more,       // there are no more items
    no_more_ends,  // what comes is not ends
};

// What a block does next. The loader finds it, ahead of the others.
struct ForwardItem {
    StatePlace place;
    ForwardWork work;
    std::int32_t chunks;    // to load, those of place.warm included; none of a padding row or a carry
    int tokens;             // of these
    int columns;            // of o, from the block's first on
    int token, batch;       // of the first of them, in the tensors
    std::int32_t segments;  // of a carry's sequence

    // Whether the state that the walk begins with is stored by another item, of ends or a carry.
    __device__ __forceinline__ bool waits_for_start(const ForwardCall& call) const {
        return place.segment.index > 0 ? place.warm == 0 : start_is_kept(call, place);
    }
};

// The walk's own copy, always in the same place: it has no register left for where it lies.
struct ForwardWalkItem {
    ForwardItem item;
    std::uint32_t number, first_chunk;  // items and chunks of the block before it
    std::uint32_t carried;              // cuts, between items
};

// What a warp of the walk has no register for either.
struct ForwardKept {
    std::int32_t next_checkpoint;
    std::uint32_t until;         // the chunk that the next checkpoint is before; counted by the block, over all items
    std::uint32_t outputs_from;  // chunks behind this one have outputs of the one before
    bool stores;                 // outputs, until then
    std::uint32_t chunk;         // between items: the next one, and where its rows will be
    int stage;
};

template <class Config>
struct ForwardShared {
    ForwardRows<Config> rows[Config::kStages];
    ForwardTriangles triangles[Config::kTurns];
    SwizzledTile<typename Config::Op, 64, 64> attention[Config::kTurns];  // P = tril(Gamma o Q^ K^^T)
    SwizzledTile<typename Config::Op, 64, Config::kColumns> outputs;      // on their way out
    ForwardFactors factors[Config::kFactors];
    // The last of rows_full: rows of the last chunk, before those past the end of the sequence are cleared. Q and the
    // values are done with while the walk is still at work with K.
    Barrier rows_full[Config::kStages + 1], rows_empty[Config::kStages], values_empty[Config::kStages];
    Barrier factors_full[Config::kFactors], factors_empty[Config::kFactors];
    Barrier lower_full[Config::kTurns], lower_empty[Config::kTurns];  // L, diagonal blocks included
    Barrier triangles_full[Config::kTurns], triangles_empty[Config::kTurns];
    ForwardItem items[Config::kItems];
    ForwardWalkItem walk;
    ForwardKept kept[Config::kWalkers / 32];
    Barrier item_full[Config::kItems], item_empty[Config::kItems];
    Barrier carry_full[2], carry_empty[2];  // transitions

    // By all threads of the block, before anybody begins.
    __device__ __forceinline__ void open(const ForwardParams& params) {
        constexpr std::uint32_t kWalkWarps = Config::kWalkers / 32;
        if (threadIdx.x == 32 && params.mapped) {
            ask_for_map(params.q_map), ask_for_map(params.k_map), ask_for_map(params.v_map);
        }
        if (threadIdx.x == 64 && params.o_mapped) ask_for_map(params.o_map);
        if (threadIdx.x == 0) {
            walk.number = walk.carried = 0;
#pragma unroll
            for (ForwardKept& it : kept) it.chunk = 0, it.stage = 0;
#pragma unroll
            for (int i = 0; i < Config::kStages; ++i) {
                rows_full[i].init(1);
                rows_empty[i].init(kWalkWarps);
                values_empty[i].init(kWalkWarps);
            }
#pragma unroll
            for (int i = 0; i < Config::kFactors; ++i) {
                factors_full[i].init(1);
                factors_empty[i].init(kWalkWarps);
            }
#pragma unroll
            for (int i = 0; i < Config::kTurns; ++i) {
                lower_full[i].init(4);
                lower_empty[i].init(2);
                triangles_full[i].init(4 + 2);
                triangles_empty[i].init(kWalkWarps);
            }
            rows_full[Config::kStages].init(1);
#pragma unroll
            for (int i = 0; i < Config::kItems; ++i) {
                item_full[i].init(1);
                item_empty[i].init(kWalkWarps + 4 + 2 + 1);
            }
#pragma unroll
            for (int i = 0; i < 2; ++i) {
                carry_full[i].init(1);
                carry_empty[i].init(kWalkWarps);
            }
            fence_barrier_init();
        }
        // What lies above the diagonal blocks is never written.
#pragma unroll
        for (int i = 0; i < Config::kTurns; ++i) {
            triangles[i].solve.template clear<Config::kThreads>();
            attention[i].template clear<Config::kThreads>();
        }
        fence_for_wgmma();
        __syncthreads();
    }
};

// A role's way through the items of its block. NOTE: for whole warps.
template <class Config>
class ForwardItems {
public:
    __device__ __forceinline__ explicit ForwardItems(ForwardShared<Config>& shared) : shared_(shared) {}

    // The next one, which stays until release().
    __device__ __forceinline__ const ForwardItem& next() {
        shared_.item_full[turn_.stage()].wait(turn_.round());
        return shared_.items[turn_.stage()];
    }
    __device__ __forceinline__ void release() {
        __syncwarp();
        if (threadIdx.x % 32 == 0) shared_.item_empty[turn_.stage()].arrive();
        ++turn_.n;
    }
    // Chunks of the next item that has any; 0: there is none, or, if `ends`, no more ends.
    __device__ __forceinline__ std::int32_t next_chunks(bool ends = false) {
        for (;;) {
            const ForwardItem& item = next();
            const std::int32_t chunks = item.chunks;
            const bool last = item.work == (ends ? ForwardWork::no_more_ends : ForwardWork::no_more);
            release();
            if (last) return 0;
            if (chunks > 0) return chunks;
        }
    }

private:
    ForwardShared<Config>& shared_;
    Turn<Config::kItems> turn_;
};

// What every role knows of its block.
template <class Config>
struct ForwardRole {
    const ForwardParams& params;
    const ForwardCall& call;
    ForwardShared<Config>& shared;

    static __device__ __forceinline__ int lane() { return static_cast<int>(threadIdx.x % 32); }
};

}  // namespace flashqla::cuda::sm90
