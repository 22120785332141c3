// The command line tool from outside: exit codes, sentences, no progress bar in a pipe, run on a file.
#include <gtest/gtest.h>
#include <sys/wait.h>

#include <cstdio>
#include <cstdlib>
#include <fstream>
#include <sstream>

#include "cases/grammar.hpp"
#include "cases/instance.hpp"
#include "cases/numbers.hpp"
#include "cases/runner.hpp"
#include "safetensors/safetensors.hpp"

namespace flashqla {
namespace {

struct Outcome {
    int code = -1;
    std::string out, err;
};

std::string contents(const std::string& path) {
    std::ifstream file(path, std::ios::binary);
    std::ostringstream text;
    text << file.rdbuf();
    return text.str();
}

std::string temporary(const std::string& name) { return testing::TempDir() + "/fqla_cli_" + name; }

Outcome flashqla(const std::string& arguments) {
    const std::string out = temporary("out"), err = temporary("err");
    const std::string command = std::string("'") + FQLA_CLI + "' " + arguments + " >'" + out + "' 2>'" + err + "'";
    const int status = std::system(command.c_str());
    Outcome run{WIFEXITED(status) ? WEXITSTATUS(status) : -1, contents(out), contents(err)};
    std::remove(out.c_str());
    std::remove(err.c_str());
    return run;
}

bool one_sentence(const std::string& text) {
    return text.rfind("flashqla: ", 0) == 0 && text.find('\n') == text.size() - 1;
}

TEST(Cli, Info) {
    const Outcome run = flashqla("info");
    EXPECT_EQ(run.code, 0);
    EXPECT_NE(run.out.find(std::string("version: ") + version()), std::string::npos);
    EXPECT_NE(run.out.find("backends: "), std::string::npos);
    EXPECT_EQ(run.err, "");
}

TEST(Cli, HelpDocumentsTheGrammar) {
    const Outcome run = flashqla("--help");
    EXPECT_EQ(run.code, 0);
    for (const char* text : {"fwd:b1,t8192,hk16,hv32,k128,v128,bf16,gate=log", "decode-equals-prefill", "Exit codes"}) {
        EXPECT_NE(run.out.find(text), std::string::npos) << text;
    }
}

TEST(Cli, DocumentationHasTheGrammarAsItIs) {
    EXPECT_NE(contents(FQLA_SOURCE "/docs/cli.md").find(cases::grammar_help()), std::string::npos)
        << "docs/cli.md: the block with the grammar has to be what `flashqla --help` prints";
}

TEST(Cli, CheckPasses) {
    const Outcome run = flashqla("check 'fwd:t=60..65,hv2,k16' 'bwd:t9,k8' 'dec:k8'");
    EXPECT_EQ(run.code, 0) << run.out << run.err;
    EXPECT_NE(run.out.find("8 passed, 0 failed\n"), std::string::npos);
    EXPECT_EQ(run.err, "") << "a pipe gets no progress bar";
    EXPECT_EQ(run.out.find('\r'), std::string::npos);
    EXPECT_EQ(run.out.find('\x1b'), std::string::npos);
}

TEST(Cli, VerboseHasALineForEachHead) {
    const Outcome run = flashqla("check -v 'fwd:t9,hv3,k8'");
    EXPECT_EQ(run.code, 0);
    for (const char* text : {"o                   head 2", "final_state         head 0", "rel L2", "worst ["}) {
        EXPECT_NE(run.out.find(text), std::string::npos) << text << "\n" << run.out;
    }
}

TEST(Cli, FailingCaseSaysHowToReproduceIt) {
    const Outcome run = flashqla("check 'fwd:t9,k8' 'fwd:t9,k8,expect=unsupported'");
    EXPECT_EQ(run.code, 1);
    EXPECT_NE(run.out.find("flashqla check 'fwd:b1,t9,hk1,hv1,k8,v8,f32,gate=log,expect=unsupported'"),
              std::string::npos)
        << run.out;
    EXPECT_NE(run.out.find("1 passed, 1 failed\n"), std::string::npos);
}

TEST(Cli, WrongInputIsOneSentence) {
    for (const char* arguments :
         {"", "nosuch", "check", "check --nosuch", "check 'fwd:t64,hvx'", "check 'fwd:t{1'",
          "check --table /nonexistent", "plan", "plan 'fwd:hk2,hv3'", "bench", "bench 'fwd:t0x'",
          "bench --compare /nonexistent 'fwd:t9'", "check --threads 0 'fwd:t9'", "run", "run /nonexistent -o x",
          "run /nonexistent", "bench 'fwd:hk2,hv3'", "plan 'fwd:t9,backend=nosuch'"}) {
        const Outcome run = flashqla(arguments);
        EXPECT_EQ(run.code, 2) << arguments;
        EXPECT_TRUE(one_sentence(run.err)) << arguments << "\n" << run.err;
    }
    EXPECT_EQ(flashqla("check 'fwd:hk2,hv3'").code, 2);
}

TEST(Cli, UnsupportedHasItsOwnCode) {
    EXPECT_EQ(flashqla("check 'fwd:t9,k8,gate=vector'").code, 3);
    EXPECT_EQ(flashqla("plan 'fwd:t9,k8,gate=vector'").code, 3);
    EXPECT_EQ(flashqla("bench 'fwd:t9,k8,gate=vector'").code, 3);
}

TEST(Cli, Plan) {
    const Outcome run = flashqla("plan 'fwd:t64,hv2,k16' 'dec:k8'");
    EXPECT_EQ(run.code, 0) << run.err;
    EXPECT_NE(run.out.find("workspace: "), std::string::npos);
    EXPECT_NE(run.out.find("backend: "), std::string::npos);
}

TEST(Cli, BenchWritesJsonLinesAndCompares) {
    const std::string file = temporary("bench.jsonl");
    std::remove(file.c_str());
    const std::string options = " 'fwd:t64,k16' 'dec:k8' --min-time 0.01";
    Outcome run = flashqla("bench --json '" + file + "' --commit abc" + options);
    EXPECT_EQ(run.code, 0) << run.err;
    EXPECT_EQ(run.err, "");
    const std::string lines = contents(file);
    EXPECT_EQ(std::count(lines.begin(), lines.end(), '\n'), 2);
    for (const char* key : {"\"commit\":\"abc\"", "\"cpu\":", "\"case\":\"fwd:b1,t64,hk1,hv1,k16,v16,f32,gate=log\"",
                            "\"pass\":\"dec\"", "\"ms\":", "\"rel_l2\":", "\"date\":", "\"gflops\":"}) {
        EXPECT_NE(lines.find(key), std::string::npos) << key;
    }
    run = flashqla("bench --compare '" + file + "'" + options);
    EXPECT_EQ(run.code, 0) << run.err;
    EXPECT_NE(run.out.find("against abc"), std::string::npos);
    std::remove(file.c_str());
}

// Tensors of a case, through a file and the tool, equal the library called directly.
void run_equals_library(const std::string& line, const std::string& flags) {
    const cases::Case c = cases::parse_case(line).value;
    const cases::Execution direct = cases::execute(c);
    ASSERT_TRUE(direct.status.ok()) << direct.status.message();
    const cases::Instance inputs = cases::make_instance(c);
    std::vector<safetensors::Named> named;
    for (const cases::HostTensor& tensor : inputs.tensors) {
        if (!inputs.is_output(tensor.name) || tensor.name == "state") named.push_back({tensor.name, tensor.view});
    }
    const std::string in = temporary("in.safetensors"), out = temporary("out.safetensors");
    ASSERT_EQ(safetensors::write(in, named), "");
    const Outcome run = flashqla("run '" + in + "' -o '" + out + "' " + flags);
    ASSERT_EQ(run.code, 0) << run.err;
    const safetensors::File file = safetensors::read(out);
    ASSERT_TRUE(file.content.ok()) << file.content.error;
    for (const std::string& name : direct.instance.outputs) {
        const safetensors::Entry* entry = file.content.find(name);
        ASSERT_NE(entry, nullptr) << name;
        const cases::HostTensor& expected = *direct.instance.find(name);
        const TensorView view = entry->view();
        ASSERT_EQ(view.rank, expected.view.rank) << name;
        ASSERT_EQ(view.shape, expected.view.shape) << name;
        std::int64_t i = 0, wrong = 0;
        cases::for_each(expected.view, [&](const std::int64_t*, std::int64_t offset) {
            const double ours = cases::load(view.data, view.dtype, i++);
            // What no correct call writes (spare checkpoint rows) is zero in the file.
            const bool written = expected.storage->allowed(expected.first_element() + offset);
            const double other = written ? cases::load(expected.view.data, expected.view.dtype, offset) : 0.0;
            wrong += ours != other;
        });
        EXPECT_EQ(wrong, 0) << name;
    }
    std::remove(in.c_str());
    std::remove(out.c_str());
}

TEST(Cli, RunForward) {
    run_equals_library("fwd:b2,t70,hk2,hv4,k16,v24,bf16,h0,layout=vk,l2norm", "--layout vk --l2norm");
}
TEST(Cli, RunPacked) {
    run_equals_library("fwd:lens=30+0+65,t100,hk1,hv2,k16,f16,gate=raw,beta=logit,neg,idx=i64,ckpt=chunk",
                       "--beta logit --neg --checkpoints chunk");
}
TEST(Cli, RunBackward) { run_equals_library("bwd:t70,hk1,hv2,k16,h0,gate=raw", ""); }
TEST(Cli, RunDecode) { run_equals_library("dec:b3,hk1,hv2,k16,group=tiled,gate=none,beta=none", "--group tiled"); }

TEST(Cli, RunRefusesInOneSentence) {
    const std::string in = temporary("bad.safetensors"), tail = "run '" + in + "' -o /dev/null";
    std::ofstream(in) << "not a safetensors file at all";
    Outcome run = flashqla(tail);
    EXPECT_EQ(run.code, 2);
    EXPECT_TRUE(one_sentence(run.err)) << run.err;
    const float x[8] = {};
    const auto with = [&](const std::vector<safetensors::Named>& tensors) {
        EXPECT_EQ(safetensors::write(in, tensors), "");
        const Outcome result = flashqla(tail);
        EXPECT_EQ(result.code, 2);
        EXPECT_TRUE(one_sentence(result.err)) << result.err;
        return result.err;
    };
    const TensorView good = tensor(x, DType::f32, {1, 2, 1, 4});
    EXPECT_NE(with({{"q", good}, {"k", good}}).find("no tensor named v"), std::string::npos);
    EXPECT_NE(with({{"q", tensor(x, DType::f32, {2, 4})}, {"k", good}, {"v", good}}).find("q has 2 dimensions"),
              std::string::npos);
    EXPECT_NE(with({{"q", good}, {"k", tensor(x, DType::f32, {1, 1, 1, 4})}, {"v", good}}).find("k has shape"),
              std::string::npos);
    EXPECT_NE(with({{"q", good}, {"k", good}, {"v", good}, {"g", good}}).find("g has shape"), std::string::npos);
    EXPECT_NE(with({{"q", tensor(x, DType::i64, {1, 1, 1, 4})}, {"k", good}, {"v", good}}).find("i64"),
              std::string::npos);
    std::remove(in.c_str());
}

}  // namespace
}  // namespace flashqla
