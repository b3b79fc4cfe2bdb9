/* SPDX-License-Identifier: Apache-2.0 */
#include <criterion/criterion.h>
#include <math.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include "tools/common/json.h"

/* What json_print() printed is freed by the caller. */
#define PRINTED(...)                                                                                                   \
    __extension__({                                                                                                    \
        char *text_;                                                                                                   \
        size_t length_;                                                                                                \
        FILE *to_ = open_memstream(&text_, &length_);                                                                  \
        json_print(to_, __VA_ARGS__);                                                                                  \
        fclose(to_);                                                                                                   \
        text_;                                                                                                         \
    })

Test(json, each_conversion_prints_what_json_has_for_it)
{
    char *text =
        PRINTED("{op:%s,bytes:%zu,us:%.2f,rate:%.2e,n:%u,far:%d,all:%llu,ok:%hhd,no:%hhd,soak:true,x_1:[%d]}\n", "put",
                (size_t)4096, 1.005, 1234.5, 7u, -1, 1ull << 40, 1, 0, 3);

    cr_assert_str_eq(text, "{\"op\":\"put\",\"bytes\":4096,\"us\":1.00,\"rate\":1.23e+03,\"n\":7,\"far\":-1,\"all\":"
                           "1099511627776,\"ok\":true,\"no\":false,\"soak\":true,\"x_1\":[3]}\n");
    free(text);
}

Test(json, a_number_that_is_not_finite_is_null)
{
    char *text = PRINTED("[%.1f,%.2e,%g,%f]", (double)NAN, (double)INFINITY, (double)-INFINITY, 1.0);

    cr_assert_str_eq(text, "[null,null,null,1.000000]");
    free(text);
}

Test(json, utf8_stays_and_what_is_not_utf8_is_replaced)
{
    static const struct {
        const char *bytes, *want;
    } rows[] = {
        {"", "\"\""},
        {"\"\\/\n\t\x01\x7f", "\"\\\"\\\\/\\u000a\\u0009\\u0001\x7f\""},
        {"gr\xc3\xbc\xc3\x9f \xe2\x82\xac \xf0\x9f\x98\x80", "\"gr\xc3\xbc\xc3\x9f \xe2\x82\xac \xf0\x9f\x98\x80\""},
        {"\xff\xc3", "\"\\ufffd\\ufffd\""},                       /* invalid first byte; truncated sequence */
        {"\xc0\xaf", "\"\\ufffd\\ufffd\""},                       /* overlong encoding of 2 bytes */
        {"\xe0\x80\xaf", "\"\\ufffd\\ufffd\\ufffd\""},            /* overlong encoding of 3 bytes */
        {"\xed\xa0\x80", "\"\\ufffd\\ufffd\\ufffd\""},            /* a surrogate */
        {"\xf4\x90\x80\x80", "\"\\ufffd\\ufffd\\ufffd\\ufffd\""}, /* beyond U+10FFFF */
        {"\xe2\x82", "\"\\ufffd\\ufffd\""},                       /* cut off */
    };

    for (size_t i = 0; i < sizeof(rows) / sizeof(rows[0]); i++) {
        char *text = PRINTED("%s", rows[i].bytes);

        cr_assert_str_eq(text, rows[i].want, "row %zu", i);
        free(text);
    }
}

/* Lines of random bytes, which Python's parser reads. */
Test(json, strings_of_any_bytes_parse)
{
    FILE *parser = popen("python3 -c 'import json, sys\nlines = sys.stdin.buffer.read().split(b\"\\n\")[:-1]\n"
                         "assert len(lines) == 3000\nfor line in lines: json.loads(line)[\"text\"]'",
                         "w");
    uint64_t seed = 42;

    cr_assert(parser);
    for (int i = 0; i < 3000; i++) {
        char text[40] = "";

        for (int k = 0; k < i % 40; k++) {
            seed = seed * 6364136223846793005u + 1442695040888963407u;
            text[k] = (char)(seed >> 56);
        }
        json_print(parser, "{text:%s}\n", text);
    }
    cr_assert_eq(pclose(parser), 0, "seed 42");
}
