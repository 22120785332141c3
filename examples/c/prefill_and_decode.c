/* A prompt through one layer, then single tokens in place on the same state; the last output must equal that of one
 * longer prefill. Errors are a status and a sentence: the program also shows one. */
#include <flashqla/flashqla.h>
#include <stdio.h>
#include <stdlib.h>

enum { kHeadsK = 2, kHeadsV = 4, kDim = 64, kPrompt = 90, kSteps = 5, kTokens = kPrompt + kSteps };

static float q[kTokens * kHeadsK * kDim], k[kTokens * kHeadsK * kDim], v[kTokens * kHeadsV * kDim];
static float g[kTokens * kHeadsV], beta[kTokens * kHeadsV];
static float o[kTokens * kHeadsV * kDim], o_whole[kTokens * kHeadsV * kDim];
static float state[kHeadsV * kDim * kDim];

static void need(fqla_status status) {
    if (status == FQLA_OK) return;
    fprintf(stderr, "%s\n", fqla_last_error());
    exit(1);
}

/* Numbers between 0 and 1. */
static float draw(void) {
    static uint32_t x = 12345;
    x = x * 1664525u + 1013904223u;
    return (float)(x >> 8) / 16777216.0f;
}

static fqla_problem layer(int64_t tokens) {
    fqla_problem problem = fqla_problem_init();
    problem.tokens = tokens;
    problem.heads_k = kHeadsK;
    problem.heads_v = kHeadsV;
    problem.dim_k = problem.dim_v = kDim;
    problem.io = FQLA_F32;
    problem.qk_l2norm = 1;
    return problem;
}

/* Rows [first, first + tokens) of a tensor [1,T,heads,width]. */
static fqla_tensor rows(float* data, int64_t first, int64_t tokens, int64_t heads, int64_t width) {
    const int64_t shape[4] = {1, tokens, heads, width};
    return fqla_tensor_of(data + first * heads * width, FQLA_F32, width == 1 ? 3 : 4, shape, NULL);
}

static fqla_tensor state_view(void) {
    const int64_t shape[4] = {1, kHeadsV, kDim, kDim};
    return fqla_tensor_of(state, FQLA_F32, 4, shape, NULL);
}

/* Scratch of at least `bytes`, aligned to 64; free *memory afterwards. */
static void* scratch_of(size_t bytes, void** memory) {
    *memory = malloc(bytes + 64);
    if (*memory == NULL) exit(1);
    return (void*)(((uintptr_t)*memory + 63) / 64 * 64);
}

static void prefill(int64_t tokens, float* out, int keep_state) {
    const fqla_problem problem = layer(tokens);
    fqla_forward_args args = fqla_forward_args_init();
    fqla_plan* plan = NULL;
    void *memory, *scratch;
    need(fqla_plan_create(&problem, fqla_cpu(), NULL, &plan));
    scratch = scratch_of(fqla_plan_workspace_bytes(plan, FQLA_FORWARD), &memory);
    args.q = rows(q, 0, tokens, kHeadsK, kDim);
    args.k = rows(k, 0, tokens, kHeadsK, kDim);
    args.v = rows(v, 0, tokens, kHeadsV, kDim);
    args.g = rows(g, 0, tokens, kHeadsV, 1);
    args.beta = rows(beta, 0, tokens, kHeadsV, 1);
    args.o = rows(out, 0, tokens, kHeadsV, kDim);
    if (keep_state) args.final_state = state_view();
    need(fqla_forward(plan, &args, scratch, fqla_plan_workspace_bytes(plan, FQLA_FORWARD), NULL));
    free(memory);
    fqla_plan_destroy(plan);
}

static void decode_rest(void) {
    const fqla_problem problem = layer(1);
    fqla_plan* plan = NULL;
    void *memory, *scratch;
    int t;
    need(fqla_plan_create(&problem, fqla_cpu(), NULL, &plan));
    scratch = scratch_of(fqla_plan_workspace_bytes(plan, FQLA_DECODE), &memory);
    for (t = kPrompt; t < kTokens; ++t) {
        fqla_decode_args args = fqla_decode_args_init();
        args.q = rows(q, t, 1, kHeadsK, kDim);
        args.k = rows(k, t, 1, kHeadsK, kDim);
        args.v = rows(v, t, 1, kHeadsV, kDim);
        args.g = rows(g, t, 1, kHeadsV, 1);
        args.beta = rows(beta, t, 1, kHeadsV, 1);
        args.o = rows(o, t, 1, kHeadsV, kDim);
        args.state = state_view();
        need(fqla_decode(plan, &args, scratch, fqla_plan_workspace_bytes(plan, FQLA_DECODE), NULL));
    }
    free(memory);
    fqla_plan_destroy(plan);
}

int main(void) {
    fqla_problem wrong = layer(1);
    fqla_plan* plan = NULL;
    float worst = 0.0f;
    size_t i;

    for (i = 0; i < sizeof q / sizeof *q; ++i) q[i] = draw() - 0.5f, k[i] = draw() - 0.5f;
    for (i = 0; i < sizeof v / sizeof *v; ++i) v[i] = draw() - 0.5f;
    for (i = 0; i < sizeof g / sizeof *g; ++i) g[i] = -draw(), beta[i] = draw();

    prefill(kPrompt, o, 1);
    decode_rest();
    prefill(kTokens, o_whole, 0);
    for (i = 0; i < sizeof o / sizeof *o; ++i) {
        const float difference = o[i] > o_whole[i] ? o[i] - o_whole[i] : o_whole[i] - o[i];
        if (!(difference <= worst)) worst = difference;
    }
    printf("flashqla %s: prefill of %d tokens and %d decoded against one prefill: largest difference %.1e\n",
           fqla_version(), (int)kPrompt, (int)kSteps, (double)worst);

    wrong.heads_v = 3; /* not a multiple of heads_k */
    if (fqla_plan_create(&wrong, fqla_cpu(), NULL, &plan) != FQLA_INVALID_ARGUMENT) return 1;
    printf("an error: %s\n", fqla_last_error());
    return worst < 1e-5f ? 0 : 1;
}
