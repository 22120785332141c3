/* One token, one head, K = V = 2, no gate: o = scale * (v k^T) q, so with k = q = e1, beta = 1 and scale = 1, o = v. */
#include <flashqla/flashqla.h>
#include <stdio.h>
#include <stdlib.h>

static int fail(const char* what) {
    printf("%s: %s\n", what, fqla_last_error());
    return 1;
}

int main(void) {
    static const int64_t shape[4] = {1, 1, 1, 2};
    float q[2] = {1.0f, 0.0f}, v[2] = {3.0f, -5.0f}, o[2] = {0.0f, 0.0f};
    fqla_problem problem = fqla_problem_init();
    fqla_forward_args args = fqla_forward_args_init();
    fqla_plan* plan = NULL;
    void *memory, *scratch;
    size_t bytes;

    problem.tokens = 1;
    problem.heads_k = problem.heads_v = 1;
    problem.dim_k = problem.dim_v = 2;
    problem.io = FQLA_F32;
    problem.gate = FQLA_GATE_NONE;
    problem.scale = 1.0f;
    if (fqla_abi_version() != FQLA_ABI_VERSION) return fail("abi");
    if (fqla_plan_create(&problem, fqla_cpu(), NULL, &plan) != FQLA_OK) return fail("plan");

    bytes = fqla_plan_workspace_bytes(plan, FQLA_FORWARD);
    memory = malloc(bytes + 64);
    if (memory == NULL) return 1;
    scratch = (void*)(((uintptr_t)memory + 63) / 64 * 64);
    args.q = args.k = fqla_tensor_of(q, FQLA_F32, 4, shape, NULL);
    args.v = fqla_tensor_of(v, FQLA_F32, 4, shape, NULL);
    args.o = fqla_tensor_of(o, FQLA_F32, 4, shape, NULL);
    if (fqla_forward(plan, &args, scratch, bytes, NULL) != FQLA_OK) return fail("forward");
    free(memory);
    fqla_plan_destroy(plan);
    printf("flashqla %s: o = %g %g\n", fqla_version(), (double)o[0], (double)o[1]);
    return o[0] == 3.0f && o[1] == -5.0f ? 0 : 1;
}
