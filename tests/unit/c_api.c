/* The C interface, compiled as C99. The C++ tests cover what the functions check; this covers the border: structs by
 * size, null pointers, texts, errors of threads, and one run of every pass with its value. */
#include <flashqla/flashqla.h>
#include <stdio.h>
#include <stdlib.h>

static int failures = 0;

static void expect(int good, const char* what, int line) {
    if (good) return;
    ++failures;
    printf("c_api.c:%d: %s\n  last error: %s\n", line, what, fqla_last_error());
}
#define EXPECT(condition) expect((condition), #condition, __LINE__)

static void expect_error(fqla_status found, fqla_status wanted, const char* sentence, int line) {
    if (found == wanted && strcmp(fqla_last_error(), sentence) == 0) return;
    ++failures;
    printf("c_api.c:%d: status %d, wanted %d\n  found  %s\n  wanted %s\n", line, (int)found, (int)wanted,
           fqla_last_error(), sentence);
}
#define EXPECT_ERROR(call, status, sentence) expect_error((call), (status), (sentence), __LINE__)

/* K = V = 2, one head, two tokens, no gate, scale 1: with k = q = e1, e2 in turn and beta = 1, o = v. */
static const int64_t token_shape[4] = {1, 2, 1, 2};
static const int64_t state_shape[4] = {1, 1, 2, 2};
static float q[4] = {1, 0, 0, 1}, v[4] = {3, -5, 7, 11}, o[4], state[4];

static union {
    unsigned char bytes[1 << 16];
    double alignment;
} memory;

static void* scratch(void) { return (void*)(((uintptr_t)memory.bytes + 63) / 64 * 64); }
static const size_t scratch_bytes = sizeof memory - 64;

static fqla_problem small_problem(void) {
    fqla_problem problem = fqla_problem_init();
    problem.tokens = 2;
    problem.heads_k = problem.heads_v = 1;
    problem.dim_k = problem.dim_v = 2;
    problem.io = FQLA_F32;
    problem.gate = FQLA_GATE_NONE;
    problem.scale = 1.0f;
    return problem;
}

static fqla_tensor tokens(const float* data) { return fqla_tensor_of(data, FQLA_F32, 4, token_shape, NULL); }
static fqla_tensor one_state(const float* data) { return fqla_tensor_of(data, FQLA_F32, 4, state_shape, NULL); }

static void test_values(void) {
    fqla_tensor view = fqla_tensor_of(q, FQLA_F32, 4, token_shape, NULL);
    const int64_t stride[4] = {40, 20, 10, 1};
    EXPECT(view.stride[0] == 4 && view.stride[1] == 2 && view.stride[2] == 2 && view.stride[3] == 1);
    EXPECT(view.device.type == FQLA_CPU && view.device.index == 0);
    view = fqla_tensor_of(q, FQLA_F32, 4, token_shape, stride);
    EXPECT(view.stride[0] == 40 && view.shape[1] == 2);
    EXPECT(fqla_abi_version() == FQLA_ABI_VERSION);
    EXPECT(strcmp(fqla_version(), "0.1.0") == 0);
    EXPECT(strcmp(fqla_last_error(), "") == 0);
}

static void test_plan(void) {
    fqla_problem problem = small_problem();
    fqla_plan_options options = fqla_plan_options_init();
    fqla_plan* plan = NULL;
    char text[4096], start[8];
    size_t length;

    EXPECT_ERROR(fqla_plan_create(&problem, fqla_cpu(), NULL, NULL), FQLA_INVALID_ARGUMENT,
                 "fqla_plan_create: plan is null");
    EXPECT_ERROR(fqla_plan_create(NULL, fqla_cpu(), NULL, &plan), FQLA_INVALID_ARGUMENT,
                 "fqla_plan_create: problem is null");
    problem.heads_v = 0;
    plan = (fqla_plan*)1;
    EXPECT_ERROR(fqla_plan_create(&problem, fqla_cpu(), NULL, &plan), FQLA_INVALID_ARGUMENT,
                 "flashqla::Plan::create: heads_v is 0; it must be 1 or more");
    EXPECT(plan == NULL);
    problem.heads_v = 1;
    problem.gate = FQLA_GATE_VECTOR;
    EXPECT(fqla_plan_create(&problem, fqla_cpu(), NULL, &plan) == FQLA_UNSUPPORTED);
    problem.gate = -7;
    EXPECT_ERROR(fqla_plan_create(&problem, fqla_cpu(), NULL, &plan), FQLA_INVALID_ARGUMENT,
                 "flashqla::Plan::create: gate is -7, which is not a value of its enumeration");

    problem = small_problem();
    options.backend = "reference";
    EXPECT(fqla_plan_create(&problem, fqla_cpu(), &options, &plan) == FQLA_OK);
    EXPECT(strcmp(fqla_plan_backend(plan, FQLA_FORWARD), "reference") == 0);
    EXPECT(strcmp(fqla_plan_backend(plan, 3), "") == 0 && strcmp(fqla_plan_backend(NULL, 0), "") == 0);
    EXPECT(fqla_plan_workspace_bytes(plan, FQLA_FORWARD) > 0 && fqla_plan_workspace_bytes(plan, -1) == 0);
    EXPECT(fqla_plan_workspace_bytes(NULL, 0) == 0 && fqla_plan_checkpoint_rows(NULL) == 0);

    length = fqla_plan_explain(plan, NULL, 0);
    EXPECT(length > 100 && length < sizeof text);
    EXPECT(fqla_plan_explain(plan, text, sizeof text) == length && strlen(text) == length);
    EXPECT(fqla_plan_explain(plan, start, sizeof start) == length && strcmp(start, "problem") == 0);
    EXPECT(fqla_plan_explain(NULL, text, sizeof text) == 0 && text[0] == '\0');
    EXPECT(fqla_system_info(text, sizeof text) > 0 && strstr(text, "version: 0.1.0\n") != NULL);
    EXPECT(fqla_backend_names(text, sizeof text) > 0 && strstr(text, "reference") != NULL);
    fqla_plan_destroy(plan);
    fqla_plan_destroy(NULL);
}

/* Structs of other versions of the interface. */
static void test_struct_sizes(void) {
    struct {
        fqla_problem problem;
        int64_t from_the_future;
    } newer;
    fqla_problem problem = small_problem(), filled = fqla_problem_init();
    fqla_plan* plan = NULL;

    problem.struct_size = 0;
    EXPECT_ERROR(fqla_plan_create(&problem, fqla_cpu(), NULL, &plan), FQLA_INVALID_ARGUMENT,
                 "fqla_plan_create: problem->struct_size is 0; set it to the size of the struct, as the _init function "
                 "does");
    problem.struct_size = 1u << 20;
    EXPECT(fqla_plan_create(&problem, fqla_cpu(), NULL, &plan) == FQLA_INVALID_ARGUMENT);
    problem.struct_size = 13;
    EXPECT(fqla_plan_create(&problem, fqla_cpu(), NULL, &plan) == FQLA_INVALID_ARGUMENT);

    /* An older caller: what lies beyond its struct is not read. */
    problem.struct_size = (uint32_t)offsetof(fqla_problem, checkpoint_every);
    problem.checkpoint_every = -1;
    problem.decode_rows = -1;
    EXPECT(fqla_plan_create(&problem, fqla_cpu(), NULL, &plan) == FQLA_OK);
    EXPECT(fqla_plan_problem(plan, &filled) == FQLA_OK);
    EXPECT(filled.decode_rows == 0 && filled.out == FQLA_F32 && filled.struct_size == sizeof filled);
    filled.decode_rows = 99;
    filled.tokens = 0;
    filled.struct_size = (uint32_t)offsetof(fqla_problem, decode_rows);
    EXPECT(fqla_plan_problem(plan, &filled) == FQLA_OK);
    EXPECT(filled.decode_rows == 99 && filled.tokens == 2);
    fqla_plan_destroy(plan);

    /* A newer caller: fields that this library does not know must be zero. */
    memset(&newer, 0, sizeof newer);
    newer.problem = small_problem();
    newer.problem.struct_size = (uint32_t)sizeof newer;
    EXPECT(fqla_plan_create(&newer.problem, fqla_cpu(), NULL, &plan) == FQLA_OK);
    fqla_plan_destroy(plan);
    newer.from_the_future = 1;
    EXPECT_ERROR(fqla_plan_create(&newer.problem, fqla_cpu(), NULL, &plan), FQLA_UNSUPPORTED,
                 "fqla_plan_create: problem sets fields that library version 0.1.0 does not know; its struct has 112 "
                 "bytes, not 120");
}

static void test_runs(void) {
    fqla_problem problem = small_problem();
    fqla_forward_args forward = fqla_forward_args_init();
    fqla_backward_args backward = fqla_backward_args_init();
    fqla_decode_args decode = fqla_decode_args_init();
    fqla_commit_args commit = fqla_commit_args_init();
    fqla_plan_options options = fqla_plan_options_init();
    fqla_plan* plan = NULL;
    float d_v[4], steps[8];
    const int64_t steps_shape[5] = {1, 2, 1, 2, 2}, one[1] = {1};
    const int32_t accepted[1] = {1};

    options.backend = "reference"; /* exact numbers below */
    problem.for_backward = 1;
    EXPECT(fqla_plan_create(&problem, fqla_cpu(), &options, &plan) == FQLA_OK);
    forward.q = forward.k = tokens(q);
    forward.v = tokens(v);
    forward.o = tokens(o);
    forward.final_state = one_state(state);
    EXPECT(fqla_forward(plan, &forward, scratch(), scratch_bytes, NULL) == FQLA_OK);
    EXPECT(o[0] == 3 && o[1] == -5 && o[2] == 7 && o[3] == 11);
    EXPECT(state[0] == 3 && state[1] == -5 && state[2] == 7 && state[3] == 11);

    backward.q = backward.k = tokens(q);
    backward.v = tokens(v);
    backward.d_o = tokens(o);
    backward.d_v = tokens(d_v);
    EXPECT(fqla_backward(plan, &backward, scratch(), scratch_bytes, NULL) == FQLA_OK);
    EXPECT(d_v[0] == 3 && d_v[1] == -5 && d_v[2] == 7 && d_v[3] == 11);

    memset(state, 0, sizeof state);
    decode.q = decode.k = tokens(q);
    decode.v = tokens(v);
    decode.o = tokens(o);
    decode.state = one_state(state);
    decode.intermediate_states = fqla_tensor_of(steps, FQLA_F32, 5, steps_shape, NULL);
    decode.commit_state = 0;
    EXPECT(fqla_decode(plan, &decode, scratch(), scratch_bytes, NULL) == FQLA_OK);
    EXPECT(o[2] == 7 && state[0] == 0 && steps[0] == 3 && steps[2] == 0 && steps[6] == 7);
    commit.state = decode.state;
    commit.intermediate_states = decode.intermediate_states;
    commit.accepted = fqla_tensor_of(accepted, FQLA_I32, 1, one, NULL);
    EXPECT(fqla_commit(plan, &commit, scratch(), scratch_bytes, NULL) == FQLA_OK);
    EXPECT(state[0] == 3 && state[1] == -5 && state[2] == 0 && state[3] == 0);

    EXPECT_ERROR(fqla_forward(NULL, &forward, scratch(), scratch_bytes, NULL), FQLA_INVALID_ARGUMENT,
                 "fqla_forward: plan is null");
    EXPECT_ERROR(fqla_decode(plan, NULL, scratch(), scratch_bytes, NULL), FQLA_INVALID_ARGUMENT,
                 "fqla_decode: args is null");
    EXPECT(fqla_backward(plan, &backward, scratch(), 0, NULL) == FQLA_WORKSPACE_TOO_SMALL);
    forward.k.shape[1] = 3;
    EXPECT_ERROR(fqla_forward(plan, &forward, scratch(), scratch_bytes, NULL), FQLA_INVALID_ARGUMENT,
                 "flashqla::forward: k has shape [1,3,1,2]; this plan needs [1,2,1,2]");
    forward.k = forward.q;
    forward.k.dtype = 12345;
    EXPECT_ERROR(fqla_forward(plan, &forward, scratch(), scratch_bytes, NULL), FQLA_INVALID_ARGUMENT,
                 "flashqla::forward: k has dtype number 12345 (not a dtype); this plan needs f32");
    forward.k = forward.q;
    forward.k.device.type = 0; /* taken as the CPU */
    EXPECT(fqla_forward(plan, &forward, scratch(), scratch_bytes, NULL) == FQLA_OK);
    forward.struct_size = 4;
    EXPECT(fqla_forward(plan, &forward, scratch(), scratch_bytes, NULL) == FQLA_INVALID_ARGUMENT);
    fqla_plan_destroy(plan);
}

int main(void) {
    test_values();
    test_plan();
    test_struct_sizes();
    test_runs();
    printf("%d failures\n", failures);
    return failures == 0 ? EXIT_SUCCESS : EXIT_FAILURE;
}
