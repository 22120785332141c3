#include "cases/instance.hpp"

#include <algorithm>
#include <cmath>
#include <limits>
#include <numeric>

#include "cases/numbers.hpp"

namespace flashqla::cases {
namespace {

// Names of the random streams. Numbers are part of what a seed means: append only.
enum Stream : int { kQ = 1, kK, kV, kG, kBeta, kALog, kDtBias, kState, kDO, kDFinal, kSlots, kParents, kHeadKind };

double sigmoid(double x) { return 1.0 / (1.0 + std::exp(-x)); }
double log_sigmoid(double x) { return x > 0 ? -std::log1p(std::exp(-x)) : x - std::log1p(std::exp(x)); }

double log_gate(GateDraw::Kind kind, const GateDraw& g, const Draw& draw, std::int64_t head, std::int64_t heads) {
    using Kind = GateDraw::Kind;
    switch (kind) {
        case Kind::weak: return -0.1 * draw.uniform();
        case Kind::typical: return log_sigmoid(draw.normal());
        case Kind::strong: return -16.0 * draw.uniform();
        case Kind::zero: return 0.0;
        case Kind::mixed: {
            constexpr Kind kKinds[] = {Kind::zero, Kind::weak, Kind::typical, Kind::strong, Kind::published};
            return log_gate(kKinds[head % 5], g, draw, head, heads);
        }
        case Kind::half0: return head % 2 == 0 ? 0.0 : log_sigmoid(draw.normal());
        case Kind::alpha0:
            if (draw.uniform(1) < 0.05) return -std::numeric_limits<double>::infinity();
            return log_sigmoid(draw.normal());
        case Kind::cliff: {
            constexpr double kSteps[] = {0.0, -50.0, -1000.0, -1e4, 0.0, 0.0, -0.1, 0.0};
            return kSteps[draw.bits(2) % 8];
        }
        case Kind::published: return head % 4 == 0 ? 0.0 : log_sigmoid(draw.normal()) / 16.0;
        case Kind::constant: return g.low;
        case Kind::uniform: return std::log(g.low + (g.high - g.low) * draw.uniform());
    }
    return 0;
}

// A raw value whose gate, -exp(A_log) softplus(value + dt_bias), falls where the name says.
double raw_gate(GateDraw::Kind kind, const GateDraw& g, const Draw& draw, std::int64_t head) {
    using Kind = GateDraw::Kind;
    switch (kind) {
        case Kind::weak: return draw.normal() - 5.0;
        case Kind::strong: return draw.normal() + 3.0;
        case Kind::zero: return -1e4;
        case Kind::mixed: {
            constexpr Kind kKinds[] = {Kind::zero, Kind::weak, Kind::typical, Kind::strong};
            return raw_gate(kKinds[head % 4], g, draw, head);
        }
        case Kind::half0: return head % 2 == 0 ? -1e4 : draw.normal();
        case Kind::alpha0: return draw.uniform(1) < 0.05 ? 1e4 : draw.normal();
        case Kind::cliff: {
            constexpr double kSteps[] = {-1e4, 50.0, 1000.0, 1e4, -1e4, -100.0, -3.0, 19.5};
            return kSteps[draw.bits(2) % 8];
        }
        case Kind::constant: return g.low;
        case Kind::uniform: return 40.0 * draw.uniform() - 20.0;  // across softplus's threshold
        case Kind::published:
        case Kind::typical: break;
    }
    return draw.normal();
}

class Builder {
public:
    Builder(const Case& c, const Setup& setup) : c_(c), setup_(setup) {
        x_.problem = problem_of(c);
        n_ = c.sequences();
        if (setup.oracle) x_.problem.out = DType::f32;
        find_rows();
        find_slots();
    }

    Instance build() {
        inputs();
        switch (c_.pass) {
            case Pass::forward: forward(); break;
            case Pass::backward: backward(); break;
            case Pass::decode: decode(); break;
        }
        x_.take_snapshots();
        return std::move(x_);
    }

private:
    bool strided() const { return c_.strided && !setup_.oracle; }
    Device device() const { return setup_.oracle ? Device{} : c_.device; }
    DType state_type() const { return setup_.oracle ? DType::f32 : c_.state; }
    std::int64_t columns() const { return c_.verify == Verify::slots ? (c_.columns ? c_.columns : c_.tokens) : 1; }
    bool is_pad(std::int64_t slot) const { return c_.pad == PadRule::negative ? slot < 0 : slot <= 0; }
    bool starts(std::int64_t n) const {
        return c_.initial && (c_.has_initial.empty() || c_.has_initial[static_cast<std::size_t>(n)] != 0);
    }
    Origin origin(std::int64_t n) const {
        return setup_.origins.empty() ? Origin{n, 0} : setup_.origins[static_cast<std::size_t>(n)];
    }

    // The pool decides padding rows, so slots come before rows are filled.
    void find_slots() {
        read_.assign(static_cast<std::size_t>(n_), -1);
        write_.assign(static_cast<std::size_t>(n_), -1);
        padding_.assign(static_cast<std::size_t>(n_), false);
        if (c_.pool > 0) {
            slots_ = c_.slots;
            if (slots_.empty()) draw_slots();
        }
        for (std::int64_t n = 0; n < n_; ++n) {
            const auto i = static_cast<std::size_t>(n);
            std::int64_t slot = n;
            if (c_.pool > 0) {
                std::int64_t column = 0;
                if (c_.verify == Verify::slots && !c_.accepted.empty()) column = c_.accepted[i] - 1;
                slot =
                    column < 0 || column >= columns() ? -1 : slots_[static_cast<std::size_t>(n * columns() + column)];
                padding_[i] = slot < 0 || is_pad(slot);
            }
            if (padding_[i]) continue;
            read_[i] = starts(n) ? slot : -1;
            write_[i] = slot;
            if (!c_.out_slots.empty()) write_[i] = is_pad(c_.out_slots[i]) ? -1 : c_.out_slots[i];
        }
        for (Row& row : x_.rows) {
            if (row.sequence >= 0 && padding_[static_cast<std::size_t>(row.sequence)]) row.sequence = -1;
        }
    }

    // Distinct slots in a seeded order; slot 0 is left out where it would mean padding.
    void draw_slots() {
        const std::int64_t first = c_.pad == PadRule::non_positive ? 1 : 0;
        std::vector<std::int64_t> all(static_cast<std::size_t>(std::max<std::int64_t>(c_.pool - first, 0)));
        std::iota(all.begin(), all.end(), first);
        for (std::size_t i = all.size(); i > 1; --i) {
            std::swap(all[i - 1], all[Draw(c_.seed, kSlots).bits(static_cast<std::int64_t>(i)) % i]);
        }
        // NOTE: a pool smaller than the case needs wraps around; such a case is one that expects a refusal.
        for (std::int64_t i = 0; i < n_ * columns(); ++i) {
            slots_.push_back(all.empty() ? 0 : all[static_cast<std::size_t>(i) % all.size()]);
        }
    }

    void find_rows() {
        x_.rows.resize(static_cast<std::size_t>(c_.batch * c_.tokens));
        std::size_t i = 0;
        for (std::int64_t n = 0; n < n_; ++n) {
            for (std::int64_t t = 0; t < c_.length(n); ++t) x_.rows[i++] = {n, t};
        }
    }

    HostTensor add(HostTensor tensor) {
        x_.tensors.push_back(tensor);
        return tensor;
    }
    void output(HostTensor tensor, int head_axis, bool by_token) {
        tensor.head_axis = head_axis;
        tensor.by_token = by_token;
        x_.outputs.push_back(tensor.name);
        for (HostTensor& known : x_.tensors) {
            if (known.name == tensor.name) known = tensor;
        }
    }
    void allow(const HostTensor& tensor, std::int64_t offset) {
        tensor.storage->allow(tensor.first_element() + offset);
    }
    void allow_all(const HostTensor& tensor) {
        for_each(tensor.view, [&](const std::int64_t*, std::int64_t offset) { allow(tensor, offset); });
    }
    HostTensor plain(const char* name, DType dtype, std::vector<std::int64_t> shape, int gap_axis = -1,
                     std::int64_t gap = 3) {
        return add(make_tensor(name, dtype, shape, strided() && gap_axis >= 0 ? Memory{gap_axis, gap, 1} : Memory{},
                               device()));
    }

    template <class F>
    HostTensor vector_of(const char* name, DType dtype, std::int64_t count, F&& value, int gap_axis = -1) {
        const HostTensor tensor = plain(name, dtype, {count}, gap_axis, 1);
        for_each(tensor.view, [&](const std::int64_t* index, std::int64_t offset) {
            store(tensor.view.data, dtype, offset, value(index[0]));
        });
        return tensor;
    }
    HostTensor numbers(const char* name, const std::vector<std::int64_t>& list, int gap_axis = -1) {
        return vector_of(
            name, c_.index, static_cast<std::int64_t>(list.size()),
            [&](std::int64_t i) { return static_cast<double>(list[static_cast<std::size_t>(i)]); }, gap_axis);
    }

    // Rows [heads, D] of the token rows that are not padding; value(sequence, token, head, line of D).
    template <class F>
    void fill_rows(const HostTensor& tensor, std::int64_t dim, F&& value) {
        std::vector<double> line(static_cast<std::size_t>(dim));
        const auto& stride = tensor.view.stride;
        for (std::int64_t b = 0; b < c_.batch; ++b) {
            for (std::int64_t t = 0; t < c_.tokens; ++t) {
                const Row row = x_.rows[static_cast<std::size_t>(b * c_.tokens + t)];
                if (row.sequence < 0) continue;
                const Origin from = origin(row.sequence);
                for (std::int64_t h = 0; h < tensor.view.shape[2]; ++h) {
                    value(from.sequence, from.token + row.token, h, line);
                    const std::int64_t begin = b * stride[0] + t * stride[1] + h * stride[2];
                    for (std::int64_t d = 0; d < dim; ++d) {
                        store(tensor.view.data, tensor.view.dtype, begin + d, line[static_cast<std::size_t>(d)]);
                    }
                }
            }
        }
    }

    void fill_keys(const HostTensor& tensor, Stream stream) {
        fill_rows(tensor, c_.dim_k, [&](std::int64_t n, std::int64_t t, std::int64_t h, std::vector<double>& line) {
            const Draw draw(c_.seed, stream, c_.keys == Keys::same && stream == kK ? -1 : n,
                            c_.keys == Keys::same && stream == kK ? -1 : t, h);
            double sum = 0;
            for (std::size_t d = 0; d < line.size(); ++d) {
                line[d] = draw.normal(static_cast<std::int64_t>(d));
                sum += line[d] * line[d];
            }
            double factor = 1.0;
            if (c_.keys == Keys::normal) factor = 1.0 / std::sqrt(static_cast<double>(c_.dim_k));
            if (c_.keys == Keys::unit || c_.keys == Keys::same) factor = sum > 0 ? 1.0 / std::sqrt(sum) : 0.0;
            for (double& x : line) x *= factor;
        });
    }
    void fill_normal(const HostTensor& tensor, Stream stream, std::int64_t dim) {
        fill_rows(tensor, dim, [&](std::int64_t n, std::int64_t t, std::int64_t h, std::vector<double>& line) {
            const Draw draw(c_.seed, stream, n, t, h);
            for (std::size_t d = 0; d < line.size(); ++d) line[d] = draw.normal(static_cast<std::int64_t>(d));
        });
    }

    // q | k | v as slices of one tensor [B,T,width], as a model's fused projection leaves them.
    void slices(HostTensor& q, HostTensor& k, HostTensor& v) {
        const std::int64_t keys = std::int64_t{c_.heads_k} * c_.dim_k, values = std::int64_t{c_.heads_v} * c_.dim_v;
        const std::int64_t width = 2 * keys + values + 3;
        const HostTensor whole = make_tensor("qkv", c_.io, {c_.batch, c_.tokens, width}, {-1, 0, 1}, device());
        const auto slice = [&](const char* name, std::int64_t begin, std::int64_t heads, std::int64_t dim) {
            HostTensor tensor = whole;
            tensor.name = name;
            tensor.view.rank = 4;
            tensor.view.shape = {c_.batch, c_.tokens, heads, dim};
            tensor.view.stride = {c_.tokens * width, width, dim, 1};
            tensor.view.data =
                static_cast<std::byte*>(whole.view.data) + begin * static_cast<std::int64_t>(size_of(c_.io));
            return tensor;
        };
        q = add(slice("q", 0, c_.heads_k, c_.dim_k));
        k = add(slice("k", keys, c_.heads_k, c_.dim_k));
        v = add(slice("v", 2 * keys, c_.heads_v, c_.dim_v));
    }

    void inputs() {
        const std::vector<std::int64_t> per_head = {c_.batch, c_.tokens, c_.heads_v};
        HostTensor q, k, v, g, beta, a_log, dt_bias, offsets;
        if (strided()) {
            slices(q, k, v);
        } else {
            q = plain("q", c_.io, {c_.batch, c_.tokens, c_.heads_k, c_.dim_k});
            k = plain("k", c_.io, {c_.batch, c_.tokens, c_.heads_k, c_.dim_k});
            v = plain("v", c_.io, {c_.batch, c_.tokens, c_.heads_v, c_.dim_v});
        }
        fill_keys(q, kQ);
        fill_keys(k, kK);
        fill_normal(v, kV, c_.dim_v);
        if (c_.gate == Gate::vector) {
            g = plain("g", c_.g_type, {c_.batch, c_.tokens, c_.heads_v, c_.dim_k});
        } else if (c_.gate != Gate::none) {
            g = plain("g", c_.g_type, per_head, 1, c_.heads_v + 3);
            fill_rows(g, 1, [&](std::int64_t n, std::int64_t t, std::int64_t h, std::vector<double>& line) {
                const Draw draw(c_.seed, kG, n, t, h);
                line[0] = c_.gate == Gate::raw ? raw_gate(c_.g.kind, c_.g, draw, h)
                                               : log_gate(c_.g.kind, c_.g, draw, h, c_.heads_v);
            });
        }
        if (c_.gate == Gate::raw) {
            // exp(A_log) in (0, 16] as trained models have it; `strong` takes the upper part.
            const double low = c_.g.kind == GateDraw::Kind::strong ? 8.0 : 0.05;
            a_log = vector_of("A_log", c_.g_type, c_.heads_v, [&](std::int64_t h) {
                return std::log(low + (16.0 - low) * std::pow(Draw(c_.seed, kALog, h).uniform(), 2.0));
            });
            dt_bias = vector_of("dt_bias", c_.g_type, c_.heads_v,
                                [&](std::int64_t h) { return Draw(c_.seed, kDtBias, h).normal(); });
        }
        if (c_.beta_given) {
            beta = plain("beta", c_.beta_type, per_head, 1, c_.heads_v + 3);
            fill_rows(beta, 1, [&](std::int64_t n, std::int64_t t, std::int64_t h, std::vector<double>& line) {
                const double x = Draw(c_.seed, kBeta, n, t, h).normal();
                line[0] = c_.beta_constant ? c_.beta_value : c_.beta_mode == BetaMode::logit ? x : sigmoid(x);
            });
        }
        if (c_.packed()) {
            std::vector<std::int64_t> list{0};
            for (const std::int64_t n : c_.lens) list.push_back(list.back() + n);
            offsets = numbers("cu_seqlens", list);
        }
        const auto hand_over = [&](auto& args) {
            args.q = q.view;
            args.k = k.view;
            args.v = v.view;
            args.g = g.view;
            args.beta = beta.view;
            args.A_log = a_log.view;
            args.dt_bias = dt_bias.view;
            args.cu_seqlens = offsets.view;
        };
        hand_over(x_.forward);
        hand_over(x_.backward);
        hand_over(x_.decode);
    }

    std::vector<std::int64_t> state_shape(std::vector<std::int64_t> outer) const {
        outer.push_back(c_.heads_v);
        outer.push_back(c_.layout == StateLayout::kv ? c_.dim_k : c_.dim_v);
        outer.push_back(c_.layout == StateLayout::kv ? c_.dim_v : c_.dim_k);
        return outer;
    }
    HostTensor states(const char* name, std::int64_t rows, DType dtype) {
        return plain(name, dtype, state_shape({rows}), 0, 7);
    }
    // S[k,v] of head h, row r of a tensor [rows,Hv,..].
    std::int64_t state_offset(const HostTensor& tensor, std::int64_t row, std::int64_t h, std::int64_t k,
                              std::int64_t v) const {
        const auto& stride = tensor.view.stride;
        const bool kv = c_.layout == StateLayout::kv;
        return row * stride[0] + h * stride[1] + (kv ? k * c_.dim_v + v : v * c_.dim_k + k);
    }

    // Start states into the rows that are read; all others keep their poison.
    void fill_states(const HostTensor& tensor) {
        if (setup_.without_states) return;
        for (std::int64_t n = 0; n < n_; ++n) {
            const std::int64_t row = read_[static_cast<std::size_t>(n)];
            if (row < 0 || row >= tensor.view.shape[0]) continue;
            const std::vector<float>* start =
                setup_.start.empty() ? nullptr : &setup_.start[static_cast<std::size_t>(n)];
            std::size_t i = 0;
            for (std::int64_t h = 0; h < c_.heads_v; ++h) {
                const Draw draw(c_.seed, kState, origin(n).sequence, h);
                for (std::int64_t k = 0; k < c_.dim_k; ++k) {
                    for (std::int64_t v = 0; v < c_.dim_v; ++v, ++i) {
                        const double x = start ? (*start)[i] : c_.initial_scale * draw.normal(k * c_.dim_v + v);
                        store(tensor.view.data, tensor.view.dtype, state_offset(tensor, row, h, k, v),
                              rounded(x, c_.state));
                    }
                }
            }
        }
    }
    void allow_row(const HostTensor& tensor, std::int64_t row) {
        if (row < 0 || row >= tensor.view.shape[0]) return;
        TensorView view = tensor.view;
        view.shape[0] = 1;
        for_each(view, [&](const std::int64_t*, std::int64_t offset) {
            allow(tensor, row * tensor.view.stride[0] + offset);
        });
    }

    HostTensor has_initial() {
        // Both types that the contract allows are used: u8 with i32 indices, i32 with i64 indices.
        const DType dtype = c_.index == DType::i32 ? DType::u8 : DType::i32;
        return vector_of("has_initial_state", dtype, n_, [&](std::int64_t n) {
            return static_cast<double>(c_.has_initial[static_cast<std::size_t>(n)]);
        });
    }

    HostTensor make_o() {
        const DType dtype = setup_.oracle || c_.out == DType::f32 ? DType::f32 : c_.io;
        const HostTensor o = plain("o", dtype, {c_.batch, c_.tokens, c_.heads_v, c_.dim_v}, 1, 5);
        allow_all(o);
        output(o, 2, true);
        return o;
    }

    void forward() {
        ForwardArgs& args = x_.forward;
        args.o = make_o().view;
        if (c_.pool > 0) {
            const HostTensor pool = states("final_state", c_.pool, state_type());
            fill_states(pool);
            if (c_.initial) args.initial_state = pool.view;
            if (c_.final) args.final_state = pool.view;
            args.state_indices = numbers("state_indices", slots_, 0).view;
            if (!c_.out_slots.empty()) args.state_indices_out = numbers("state_indices_out", c_.out_slots, 0).view;
            if (c_.final) {
                for (const std::int64_t row : write_) allow_row(pool, row);
                output(pool, 1, false);
            }
        } else {
            if (c_.in_place) {
                const HostTensor both = states("final_state", n_, state_type());
                fill_states(both);
                args.initial_state = args.final_state = both.view;
                allow_all(both);
                output(both, 1, false);
            } else {
                if (c_.initial) {
                    const HostTensor start = states("initial_state", n_, state_type());
                    fill_states(start);
                    args.initial_state = start.view;
                }
                if (c_.final) {
                    const HostTensor end = states("final_state", n_, state_type());
                    args.final_state = end.view;
                    allow_all(end);
                    output(end, 1, false);
                }
            }
        }
        if (!c_.has_initial.empty()) args.has_initial_state = has_initial().view;
        checkpoints();
    }

    void checkpoints() {
        if (c_.checkpoints == Checkpoints::none) return;
        // NOTE: one row more than needed, which nobody may touch.
        std::int64_t rows = 0;
        std::vector<std::int64_t> written;
        if (c_.checkpoints == Checkpoints::listed) {
            const HostTensor list =
                plain("checkpoint_list", c_.index, {static_cast<std::int64_t>(c_.checkpoint_list.size()), 2});
            for (const auto& [n, t] : c_.checkpoint_list) {
                store(list.view.data, c_.index, 2 * rows, static_cast<double>(n));
                store(list.view.data, c_.index, 2 * rows + 1, static_cast<double>(t));
                if (n >= 0) written.push_back(rows);
                ++rows;
            }
            x_.forward.checkpoint_list = list.view;
        } else {
            for (std::int64_t n = 0; n < n_; ++n) {
                const std::int64_t length = c_.length(n);
                const std::int64_t count = c_.checkpoints == Checkpoints::chunk_starts ? (length + kChunk - 1) / kChunk
                                                                                       : length / c_.checkpoint_every;
                for (std::int64_t i = 0; i < count; ++i) written.push_back(rows++);
            }
        }
        const HostTensor tensor =
            states("checkpoints", std::max<std::int64_t>(rows, least_checkpoint_rows()), state_type());
        for (const std::int64_t row : written) allow_row(tensor, row);
        x_.forward.checkpoints = tensor.view;
        output(tensor, 1, false);
    }
    // What Plan::checkpoint_rows() has to promise at least: the bound over all lengths with these T and N.
    std::int64_t least_checkpoint_rows() const {
        switch (c_.checkpoints) {
            case Checkpoints::chunk_starts:
                if (!c_.packed()) return c_.batch * ((c_.tokens + kChunk - 1) / kChunk);
                return (c_.tokens + std::min(n_, c_.tokens) * (kChunk - 1)) / kChunk;
            case Checkpoints::every_n: return c_.batch * (c_.tokens / c_.checkpoint_every);
            default: return 0;
        }
    }

    HostTensor gradient(const char* name, DType dtype, std::vector<std::int64_t> shape, int head_axis, bool by_token) {
        if (!c_.wants(name)) return {};
        const bool gap = strided() && shape.size() > 1;
        const HostTensor tensor = add(make_tensor(name, setup_.oracle ? DType::f32 : dtype, shape,
                                                  gap ? Memory{by_token ? 1 : 0, 5, 1} : Memory{}, device()));
        allow_all(tensor);
        output(tensor, head_axis, by_token);
        return tensor;
    }

    void backward() {
        BackwardArgs& args = x_.backward;
        if (c_.initial) {
            const HostTensor start = states("initial_state", n_, state_type());
            fill_states(start);
            args.initial_state = start.view;
        }
        if (!c_.drop_d_o) {
            const DType dtype = c_.out == DType::f32 ? DType::f32 : c_.io;
            const HostTensor d_o = plain("d_o", dtype, {c_.batch, c_.tokens, c_.heads_v, c_.dim_v}, 1, 5);
            fill_normal(d_o, kDO, c_.dim_v);
            args.d_o = d_o.view;
        }
        if (!c_.drop_d_final) {
            const HostTensor d_final = states("d_final_state", n_, state_type());
            for (std::int64_t n = 0; n < n_; ++n) {
                for (std::int64_t h = 0; h < c_.heads_v; ++h) {
                    const Draw draw(c_.seed, kDFinal, origin(n).sequence, h);
                    for (std::int64_t k = 0; k < c_.dim_k; ++k) {
                        for (std::int64_t v = 0; v < c_.dim_v; ++v) {
                            store(d_final.view.data, d_final.view.dtype, state_offset(d_final, n, h, k, v),
                                  rounded(draw.normal(k * c_.dim_v + v), c_.state));
                        }
                    }
                }
            }
            args.d_final_state = d_final.view;
        }
        const DType dtype = c_.grad == DType::none ? c_.io : c_.grad;
        const std::vector<std::int64_t> keys = {c_.batch, c_.tokens, c_.heads_k, c_.dim_k};
        const std::vector<std::int64_t> per_head = {c_.batch, c_.tokens, c_.heads_v};
        args.d_q = gradient("d_q", dtype, keys, 2, true).view;
        args.d_k = gradient("d_k", dtype, keys, 2, true).view;
        args.d_v = gradient("d_v", dtype, {c_.batch, c_.tokens, c_.heads_v, c_.dim_v}, 2, true).view;
        if (c_.gate != Gate::none) args.d_g = gradient("d_g", DType::f32, per_head, 2, true).view;
        if (c_.beta_given) args.d_beta = gradient("d_beta", DType::f32, per_head, 2, true).view;
        if (c_.gate == Gate::raw) {
            args.d_A_log = gradient("d_A_log", DType::f32, {c_.heads_v}, 0, false).view;
            args.d_dt_bias = gradient("d_dt_bias", DType::f32, {c_.heads_v}, 0, false).view;
        }
        if (c_.initial) {
            args.d_initial_state = gradient("d_initial_state", c_.state, state_shape({n_}), 1, false).view;
        }
    }

    void decode() {
        DecodeArgs& args = x_.decode;
        const bool speculative = c_.verify == Verify::buffer || c_.verify == Verify::tree;
        args.o = make_o().view;
        args.commit_state = c_.commit && !speculative;
        const HostTensor pool = states("state", c_.pool > 0 ? c_.pool : n_, state_type());
        fill_states(pool);
        args.state = pool.view;
        output(pool, 1, false);
        HostTensor indices;
        if (c_.pool > 0 && c_.verify == Verify::slots) {
            indices = plain("state_indices", c_.index, {n_, columns()}, 0);
            for_each(indices.view, [&](const std::int64_t* index, std::int64_t offset) {
                const std::int64_t i = index[0] * columns() + index[1];
                store(indices.view.data, c_.index, offset, static_cast<double>(slots_[static_cast<std::size_t>(i)]));
            });
            if (!c_.accepted.empty()) args.num_accepted = numbers("num_accepted", c_.accepted).view;
        } else if (c_.pool > 0) {
            indices = numbers("state_indices", slots_, 0);
        }
        args.state_indices = indices.view;
        if (!c_.out_slots.empty()) args.state_indices_out = numbers("state_indices_out", c_.out_slots, 0).view;
        if (!c_.has_initial.empty() || !c_.initial) {
            if (c_.has_initial.empty()) c_.has_initial.assign(static_cast<std::size_t>(n_), 0);
            args.has_initial_state = has_initial().view;
        }
        if (args.commit_state) {
            for (std::int64_t n = 0; n < n_; ++n) {
                if (padding_[static_cast<std::size_t>(n)]) continue;
                if (c_.verify != Verify::slots) {
                    allow_row(pool, write_[static_cast<std::size_t>(n)]);
                    continue;
                }
                for (std::int64_t t = 0; t < std::min(c_.length(n), columns()); ++t) {
                    const std::int64_t slot = slots_[static_cast<std::size_t>(n * columns() + t)];
                    if (!is_pad(slot)) allow_row(pool, slot);
                }
            }
        }
        if (speculative) speculation(pool, indices);
    }

    void speculation(const HostTensor& pool, const HostTensor& indices) {
        DecodeArgs& args = x_.decode;
        std::int64_t rows = n_;
        for (const std::int64_t m : c_.buffer_rows) rows = std::max(rows, m + 1);
        const std::int64_t most = c_.tokens_per_row();
        // One step more than T, which nobody may touch.
        const HostTensor buffer = plain("intermediate_states", state_type(), state_shape({rows, most + 1}), 0, 7);
        output(buffer, 2, false);
        std::vector<std::int64_t> row_of(static_cast<std::size_t>(n_));
        std::iota(row_of.begin(), row_of.end(), 0);
        HostTensor buffer_rows;
        if (!c_.buffer_rows.empty()) {
            row_of = c_.buffer_rows;
            buffer_rows = numbers("intermediate_indices", c_.buffer_rows);
        }
        std::vector<std::int64_t> accepted = c_.accepted;
        if (accepted.empty()) {
            for (std::int64_t n = 0; n < n_; ++n) accepted.push_back(std::min(n % (most + 1), c_.length(n)));
        }
        for (std::int64_t n = 0; n < n_; ++n) {
            const auto i = static_cast<std::size_t>(n);
            if (padding_[i] || row_of[i] < 0) continue;
            for (std::int64_t t = 0; t < c_.length(n); ++t) {
                TensorView view = buffer.view;
                view.shape[0] = view.shape[1] = 1;
                for_each(view, [&](const std::int64_t*, std::int64_t offset) {
                    allow(buffer, row_of[i] * view.stride[0] + t * view.stride[1] + offset);
                });
            }
            if (accepted[i] >= 1 && accepted[i] <= c_.length(n)) allow_row(pool, write_[i]);
        }
        args.intermediate_states = buffer.view;
        args.intermediate_indices = buffer_rows.view;
        if (c_.verify == Verify::tree) {
            const HostTensor parents = plain("parent_tokens", DType::i32, {n_, most}, 0);
            for_each(parents.view, [&](const std::int64_t* index, std::int64_t offset) {
                // -1 (the start state) or an earlier token, with a bias towards branching.
                const auto choices = static_cast<std::uint64_t>(index[1] + 1);
                const auto parent = Draw(c_.seed, kParents, index[0]).bits(index[1]) % choices;
                store(parents.view.data, DType::i32, offset, static_cast<double>(parent) - 1.0);
            });
            args.parent_tokens = parents.view;
        }
        x_.with_commit = c_.commit;
        x_.commit.state = pool.view;
        x_.commit.state_indices = indices.view;
        x_.commit.intermediate_states = buffer.view;
        x_.commit.intermediate_indices = buffer_rows.view;
        x_.commit.accepted = numbers("accepted", accepted).view;
    }

    Case c_;
    const Setup& setup_;
    Instance x_;
    std::int64_t n_ = 0;
    std::vector<std::int64_t> slots_, read_, write_;
    std::vector<bool> padding_;
};

}  // namespace

Instance make_instance(const Case& c, const Setup& setup) { return Builder(c, setup).build(); }

}  // namespace flashqla::cases
