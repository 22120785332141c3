/* FlashQLA: Gated Delta Net (GDN) linear attention. The C99 contract, the same as flashqla.hpp (C++20), which says more
 * about each argument. Needs the C standard library only.
 *
 * Per sequence and value head, with state S (K x V), for each token t in this order:
 *   1. decay   S <- exp(g_t) S
 *   2. delta   d_t = beta_t (v_t - S^T k_t),   S <- S + k_t d_t^T
 *   3. read    o_t = scale * S^T q_t
 *
 * Letters in shapes: B batch, T tokens, N sequences, Hk key heads, Hv value heads (a multiple of Hk), K and V head
 * sizes. `state` stands for [rows,Hv,K,V] or [rows,Hv,V,K] by fqla_problem.state_layout.
 *
 * Use:
 *   fqla_problem problem = fqla_problem_init();             sizes, dtypes, modes
 *   fqla_plan_create(&problem, fqla_cpu(), NULL, &plan);
 *   scratch of fqla_plan_workspace_bytes(plan, FQLA_FORWARD) bytes, aligned to 64
 *   fqla_forward_args args = fqla_forward_args_init();      tensors
 *   fqla_forward(plan, &args, scratch, bytes, NULL);
 *   fqla_plan_destroy(plan);
 *
 * Errors: functions return FQLA_OK or another status, and fqla_last_error() has one full sentence about the last
 * failure of the calling thread. Nothing prints, exits or throws. The run functions (forward, backward, decode, commit)
 * allocate nothing unless they fail, and never write to an input.
 *
 * Compatibility: structs that begin with struct_size may grow at their end. The *_init functions set it; a library that
 * is newer than the caller gives the missing fields their defaults, an older one refuses fields that it does not know
 * unless they are zero. fqla_tensor and fqla_device are plain values that never change within an ABI version.
 */
#ifndef FLASHQLA_FLASHQLA_H
#define FLASHQLA_FLASHQLA_H

#include <stddef.h>
#include <stdint.h>
#include <string.h>

#ifndef FQLA_API
#if defined(FQLA_STATIC)
#define FQLA_API
#elif defined(__GNUC__)
#define FQLA_API __attribute__((visibility("default")))
#else
#define FQLA_API
#endif
#endif

#define FQLA_ABI_VERSION 1
#define FQLA_MAX_RANK 6
#define FQLA_CHUNK 64
#define FQLA_MAX_DECODE_TOKENS 16

#ifdef __cplusplus
extern "C" {
#endif

/* ---------------------------------------------------------------------------------------------------------- values */

typedef enum fqla_status {
    FQLA_OK = 0,
    FQLA_INVALID_ARGUMENT = 1,    /* the sentence names the argument, what was found and what is allowed */
    FQLA_UNSUPPORTED = 2,         /* well formed, but no backend can do it; the sentence says why each one refused */
    FQLA_WORKSPACE_TOO_SMALL = 3, /* the sentence says how many bytes the plan needs */
    FQLA_OUT_OF_MEMORY = 4,
    FQLA_DEVICE_ERROR = 5,
    FQLA_COMMUNICATION_ERROR = 6,
    FQLA_INTERNAL = 7
} fqla_status;

/* Enumerations travel as int32_t, so that their size is the same in every compiler. */
enum { FQLA_NONE = 0, FQLA_F32 = 1, FQLA_F16 = 2, FQLA_BF16 = 3, FQLA_I32 = 4, FQLA_I64 = 5, FQLA_U8 = 6 }; /* dtype */
enum { FQLA_CPU = 1, FQLA_CUDA = 2 }; /* device type, DLPack's numbers; 0 is taken as FQLA_CPU */
enum { FQLA_FORWARD = 0, FQLA_BACKWARD = 1, FQLA_DECODE = 2 }; /* pass */

enum { FQLA_GATE_NONE = 0, FQLA_GATE_LOG = 1, FQLA_GATE_RAW = 2, FQLA_GATE_VECTOR = 3 };
enum { FQLA_BETA_VALUE = 0, FQLA_BETA_LOGIT = 1 };
enum { FQLA_GROUPING_INTERLEAVED = 0, FQLA_GROUPING_TILED = 1 };
enum { FQLA_STATE_KV = 0, FQLA_STATE_VK = 1 };
enum { FQLA_PAD_NEGATIVE = 0, FQLA_PAD_NON_POSITIVE = 1 };
enum {
    FQLA_CHECKPOINTS_NONE = 0,
    FQLA_CHECKPOINTS_CHUNK_STARTS = 1,
    FQLA_CHECKPOINTS_EVERY_N = 2,
    FQLA_CHECKPOINTS_LISTED = 3
};

typedef struct fqla_device {
    int32_t type;
    int32_t index;
} fqla_device;

/* A view of the caller's memory. All zero = "not given". Strides count elements; the last one is 1 (or the last size is
 * 1), all others are free. */
typedef struct fqla_tensor {
    void* data;
    int32_t dtype;
    int32_t rank;
    int64_t shape[FQLA_MAX_RANK];
    int64_t stride[FQLA_MAX_RANK];
    fqla_device device;
} fqla_tensor;

/* A view on the CPU; set .device for another place. stride NULL = contiguous, last dimension fastest. A rank outside
 * 0..FQLA_MAX_RANK is kept as it is, for the run functions to refuse. */
FQLA_API fqla_tensor fqla_tensor_of(const void* data, int32_t dtype, int32_t rank, const int64_t* shape,
                                    const int64_t* stride);

/* ------------------------------------------------------------------------------------------------------------- plan */

/* What is computed. Sizes are bounds where the text says so. */
typedef struct fqla_problem {
    uint32_t struct_size;
    int32_t heads_k;          /* Hk */
    int64_t batch;            /* B; 1 when packed. Default 1 */
    int64_t tokens;           /* T; when packed, the rows of the token dimension, padding included */
    int64_t sequences;        /* 0: fixed length, a sequence a batch row. > 0: packed, cu_seqlens has sequences + 1 */
    int32_t heads_v;          /* Hv */
    int32_t dim_k;            /* K */
    int32_t dim_v;            /* V */
    int32_t io;               /* q, k, v: f32, f16 or bf16. Default bf16 */
    int32_t out;              /* o: FQLA_NONE = as io (default), or f32 */
    int32_t gate;             /* FQLA_GATE_*. Default log */
    int32_t beta_mode;        /* FQLA_BETA_*. Default value */
    float beta_factor;        /* 1 (default), or 2 for negative eigenvalues */
    int32_t qk_l2norm;        /* 0 (default) or 1: x / sqrt(sum x^2 + l2norm_eps) on the rows of q and k */
    float l2norm_eps;         /* default 1e-6 */
    float scale;              /* 0 (default) = K^-1/2 */
    int32_t grouping;         /* FQLA_GROUPING_*. Default interleaved: value head h reads key head h / (Hv/Hk) */
    int32_t state_layout;     /* FQLA_STATE_*. Default kv */
    int32_t pad_rule;         /* FQLA_PAD_*. Default negative: a slot < 0 marks a padding row */
    int32_t checkpoints;      /* FQLA_CHECKPOINTS_*. Default none */
    int32_t for_backward;     /* 0 (default) or 1: plan fqla_backward() too */
    int64_t checkpoint_every; /* n of FQLA_CHECKPOINTS_EVERY_N */
    int64_t decode_rows;      /* packed: the first so many sequences have at most 16 tokens; helps planning */
} fqla_problem;

typedef struct fqla_plan_options {
    uint32_t struct_size;
    int32_t threads;         /* CPU: 0 = as many as OpenMP would use */
    const char* backend;     /* NULL or "" = the best that can; or a name from fqla_backend_names() */
    int32_t context_split;   /* segments a sequence is cut into: 0 = automatic, 1 = never, n */
    int32_t deterministic;   /* 1: bits independent of the number of threads */
    int32_t batch_invariant; /* 1: a sequence's bits independent of its neighbours in the batch */
    int32_t reserved;        /* 0 */
} fqla_plan_options;

/* Every decision about a problem. Immutable; one plan may run on many threads at once, each with its own workspace. */
typedef struct fqla_plan fqla_plan;

/* options may be NULL. On failure *plan is NULL. */
FQLA_API fqla_status fqla_plan_create(const fqla_problem* problem, fqla_device device, const fqla_plan_options* options,
                                      fqla_plan** plan);
FQLA_API void fqla_plan_destroy(fqla_plan* plan); /* NULL is fine */

/* Bytes of scratch that a pass needs; 0 also when plan is NULL or the pass was not planned. fqla_commit() uses that of
 * FQLA_DECODE. */
FQLA_API size_t fqla_plan_workspace_bytes(const fqla_plan* plan, int32_t pass);
FQLA_API const char* fqla_plan_backend(const fqla_plan* plan, int32_t pass); /* "" when not planned */
FQLA_API int64_t fqla_plan_checkpoint_rows(const fqla_plan* plan); /* upper bound of rows of the checkpoint tensor */
/* The problem with out and scale filled in. problem->struct_size says how much may be written. */
FQLA_API fqla_status fqla_plan_problem(const fqla_plan* plan, fqla_problem* problem);

/* Texts are written like snprintf does: at most size bytes, always ended by '\0' when size > 0. The result is the full
 * length without the '\0'; 0 when there is no text. buffer may be NULL when size is 0. */
FQLA_API size_t fqla_plan_explain(const fqla_plan* plan, char* buffer, size_t size);

/* -------------------------------------------------------------------------------------------------------------- run */

/* workspace: at least fqla_plan_workspace_bytes() bytes, aligned to 64; its content means nothing before and after.
 * stream: cudaStream_t; ignored on the CPU. */

typedef struct fqla_forward_args {
    uint32_t struct_size;
    int32_t reserved;              /* 0 */
    fqla_tensor q;                 /* [B,T,Hk,K] io */
    fqla_tensor k;                 /* [B,T,Hk,K] io */
    fqla_tensor v;                 /* [B,T,Hv,V] io */
    fqla_tensor g;                 /* [B,T,Hv] f32/f16/bf16; not given with FQLA_GATE_NONE */
    fqla_tensor beta;              /* [B,T,Hv] f32/f16/bf16; not given = 1 */
    fqla_tensor A_log;             /* [Hv] f32/f16/bf16, FQLA_GATE_RAW only */
    fqla_tensor dt_bias;           /* [Hv] f32/f16/bf16, FQLA_GATE_RAW only; not given = 0 */
    fqla_tensor cu_seqlens;        /* [N+1] i32/i64; packed only. Starts at 0, never decreases, ends at or before T */
    fqla_tensor initial_state;     /* state [N or slots,..] f32/f16/bf16; not given = zeros */
    fqla_tensor final_state;       /* state; not given = not wanted. May be the same view as initial_state */
    fqla_tensor state_indices;     /* [N] i32/i64: slot that sequence n reads, and writes */
    fqla_tensor state_indices_out; /* [N] i32/i64: slot that sequence n writes instead */
    fqla_tensor has_initial_state; /* [N] u8/i32; 0 = start from zeros */
    fqla_tensor checkpoints;       /* state [rows,..] */
    fqla_tensor checkpoint_list;   /* [rows,2] i32/i64 of (sequence, token), FQLA_CHECKPOINTS_LISTED only */
    fqla_tensor o;                 /* [B,T,Hv,V] out */
} fqla_forward_args;

FQLA_API fqla_status fqla_forward(const fqla_plan* plan, const fqla_forward_args* args, void* workspace,
                                  size_t workspace_bytes, void* stream);

/* Gradients of <d_o, o> + <d_final_state, final_state>. Either may be absent (zero); every output may be absent. */
typedef struct fqla_backward_args {
    uint32_t struct_size;
    int32_t reserved;                                                        /* 0 */
    fqla_tensor q, k, v, g, beta, A_log, dt_bias, cu_seqlens, initial_state; /* as in fqla_forward_args */
    fqla_tensor d_o;             /* [B,T,Hv,V] f32/f16/bf16, like every gradient */
    fqla_tensor d_final_state;   /* state [N,..] */
    fqla_tensor d_q;             /* [B,T,Hk,K] */
    fqla_tensor d_k;             /* [B,T,Hk,K] */
    fqla_tensor d_v;             /* [B,T,Hv,V] */
    fqla_tensor d_g;             /* [B,T,Hv] of the argument g */
    fqla_tensor d_beta;          /* [B,T,Hv] of the argument beta */
    fqla_tensor d_A_log;         /* [Hv] FQLA_GATE_RAW only */
    fqla_tensor d_dt_bias;       /* [Hv] FQLA_GATE_RAW only */
    fqla_tensor d_initial_state; /* state [N,..] */
} fqla_backward_args;

FQLA_API fqla_status fqla_backward(const fqla_plan* plan, const fqla_backward_args* args, void* workspace,
                                   size_t workspace_bytes, void* stream);

/* A short run of tokens (at most 16) for each of N rows, on a pool of states, in place. flashqla.hpp tells the two
 * contracts for speculative verification. */
typedef struct fqla_decode_args {
    uint32_t struct_size;
    int32_t commit_state; /* default 1. 0: the pool stays as it is until fqla_commit() */
    fqla_tensor q, k, v, g, beta, A_log, dt_bias, cu_seqlens; /* as in fqla_forward_args */
    fqla_tensor state;                                        /* the pool, state [slots,..], updated in place */
    fqla_tensor state_indices;                                /* [N] or [N,S] i32/i64; not given: row n uses slot n */
    fqla_tensor state_indices_out;                            /* [N] i32/i64 */
    fqla_tensor has_initial_state;                            /* [N] u8/i32 */
    fqla_tensor num_accepted;                                 /* [N] i32/i64, with state_indices [N,S] */
    fqla_tensor intermediate_states;                          /* [M,>=T,Hv,..] */
    fqla_tensor intermediate_indices;                         /* [N] i32/i64 */
    fqla_tensor parent_tokens;                                /* [N,>=T] i32/i64 */
    fqla_tensor o;                                            /* [B,T,Hv,V] out */
} fqla_decode_args;

FQLA_API fqla_status fqla_decode(const fqla_plan* plan, const fqla_decode_args* args, void* workspace,
                                 size_t workspace_bytes, void* stream);

/* state[state_indices[n]] <- intermediate_states[m, accepted[n]-1], m = intermediate_indices[n] (default n). */
typedef struct fqla_commit_args {
    uint32_t struct_size;
    int32_t reserved;                                                            /* 0 */
    fqla_tensor state, state_indices, intermediate_states, intermediate_indices; /* as in fqla_decode_args */
    fqla_tensor accepted;                                                        /* [N] i32/i64 */
} fqla_commit_args;

FQLA_API fqla_status fqla_commit(const fqla_plan* plan, const fqla_commit_args* args, void* workspace,
                                 size_t workspace_bytes, void* stream);

/* ------------------------------------------------------------------------------------------------------ information */

FQLA_API const char* fqla_last_error(void); /* of this thread; "" before the first failure. Valid until the next one */
FQLA_API const char* fqla_version(void);    /* "0.1.0" */
FQLA_API int32_t fqla_abi_version(void);    /* FQLA_ABI_VERSION of the library that was loaded */
FQLA_API size_t fqla_backend_names(char* buffer, size_t size); /* as fqla_plan_explain */
FQLA_API size_t fqla_system_info(char* buffer, size_t size);   /* as fqla_plan_explain */

/* --------------------------------------------------------------------------------------------------------- defaults */

/* Inline, so that struct_size is the size this file says, whatever library is loaded. */

static inline fqla_device fqla_cpu(void) {
    fqla_device device = {FQLA_CPU, 0};
    return device;
}

static inline fqla_problem fqla_problem_init(void) {
    fqla_problem problem;
    memset(&problem, 0, sizeof problem);
    problem.struct_size = (uint32_t)sizeof problem;
    problem.batch = 1;
    problem.io = FQLA_BF16;
    problem.gate = FQLA_GATE_LOG;
    problem.beta_factor = 1.0f;
    problem.l2norm_eps = 1e-6f;
    return problem;
}

static inline fqla_plan_options fqla_plan_options_init(void) {
    fqla_plan_options options;
    memset(&options, 0, sizeof options);
    options.struct_size = (uint32_t)sizeof options;
    return options;
}

static inline fqla_forward_args fqla_forward_args_init(void) {
    fqla_forward_args args;
    memset(&args, 0, sizeof args);
    args.struct_size = (uint32_t)sizeof args;
    return args;
}

static inline fqla_backward_args fqla_backward_args_init(void) {
    fqla_backward_args args;
    memset(&args, 0, sizeof args);
    args.struct_size = (uint32_t)sizeof args;
    return args;
}

static inline fqla_decode_args fqla_decode_args_init(void) {
    fqla_decode_args args;
    memset(&args, 0, sizeof args);
    args.struct_size = (uint32_t)sizeof args;
    args.commit_state = 1;
    return args;
}

static inline fqla_commit_args fqla_commit_args_init(void) {
    fqla_commit_args args;
    memset(&args, 0, sizeof args);
    args.struct_size = (uint32_t)sizeof args;
    return args;
}

#ifdef __cplusplus
}
#endif

#endif
