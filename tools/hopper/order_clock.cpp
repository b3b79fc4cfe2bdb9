/* SPDX-License-Identifier: Apache-2.0 */
#include "tools/hopper/order_clock.h"

#include <atomic>

namespace hopper
{

static std::atomic<uint64_t> ids{1};

/* The result of joining two vectors that many threads of a warp or CTA join in the same way. */
struct joined {
    uint64_t a, b;
    clocks_ref result;
};
enum { REMEMBERED = 512 };

static clocks_ref join(const clocks_ref &a, const clocks_ref &b)
{
    const clocks_ref &longer = a->at.size() >= b->at.size() ? a : b, &shorter = a->at.size() >= b->at.size() ? b : a;
    const uint32_t *l = longer->at.data(), *s = shorter->at.data();
    size_t both = shorter->at.size();
    /* above: the shorter vector has some later time; below: the longer one has */
    uint32_t above = 0, below = 0;
    for (size_t i = 0; i < both; i++) {
        above |= s[i] > l[i];
        below |= l[i] > s[i];
    }
    if (!above)
        return longer;
    for (size_t i = both; i < longer->at.size(); i++)
        below |= l[i];
    if (!below)
        return shorter;
    auto c = std::make_shared<clocks>(*longer);
    c->id = ids++;
    for (size_t i = 0; i < both; i++)
        c->at[i] = s[i] > l[i] ? s[i] : l[i];
    return c;
}

clocks_ref clocks_join_anywhere(const clocks_ref &a, const clocks_ref &b)
{
    if (!a || !b || a == b)
        return a ? a : b;
    return join(a, b);
}

clocks_ref clocks_join(const clocks_ref &a, const clocks_ref &b)
{
    static struct joined *remembered = new struct joined[REMEMBERED]();
    if (!a || !b || a == b)
        return a ? a : b;
    struct joined *r = &remembered[(a->id * 0x9e3779b97f4a7c15ull + b->id) % REMEMBERED];
    if (r->a != a->id || r->b != b->id)
        *r = {a->id, b->id, join(a, b)};
    return r->result;
}

/* Makes *to a vector of its own, which may be changed. */
static void own(clocks_ref *to)
{
    if (!*to)
        *to = std::make_shared<clocks>();
    else if (to->use_count() > 1)
        *to = std::make_shared<clocks>(**to);
    (*to)->id = ids++;
}

void clocks_merge(clocks_ref *to, const clocks_ref &from)
{
    if (!from || from == *to)
        return;
    if (!*to) {
        *to = from;
        return;
    }
    own(to);
    std::vector<uint32_t> &t = (*to)->at;
    const std::vector<uint32_t> &f = from->at;
    if (t.size() < f.size())
        t.resize(f.size());
    for (size_t i = 0; i < f.size(); i++)
        t[i] = f[i] > t[i] ? f[i] : t[i];
}

void clocks_raise(clocks_ref *to, uint32_t agent, uint32_t time)
{
    if (clocks_at(*to, agent) >= time)
        return;
    own(to);
    std::vector<uint32_t> &t = (*to)->at;
    if (t.size() <= agent)
        t.resize(agent + 64);
    t[agent] = time;
}

} // namespace hopper
