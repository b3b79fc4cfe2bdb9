/* SPDX-License-Identifier: Apache-2.0 */
#include "tools/perf/report.h"

#include <inttypes.h>
#include <stdio.h>
#include <string.h>

void report_putsignal(const struct putsignal_result *r, bool json, bool first)
{
    if (json) {
        printf("{\"op\":\"putsignal\",\"policy\":\"%s\",\"group\":\"%s\",\"bytes\":%" PRIu64 ",\"concurrency\":%u,"
               "\"peers\":%u,\"iterations\":%u,\"put_only_us\":%.2f,\"put_signal_us\":%.2f,\"put_only_GBps\":%.4f,"
               "\"put_signal_GBps\":%.4f,\"efficiency\":%.4f,\"fences\":%.2f,\"signals\":%.2f,\"stall_us\":%.2f,"
               "\"errors\":%" PRIu64 "}\n",
               r->policy, r->group, r->bytes, r->concurrency, r->peers, r->iterations, r->put_only_us, r->put_signal_us,
               r->put_only_GBps, r->put_signal_GBps, r->efficiency, r->fences, r->signals, r->stall_us, r->errors);
        fflush(stdout);
        return;
    }
    if (first)
        printf("%-10s %-8s %9s %5s %5s %12s %12s %10s %10s %7s %8s %8s %6s\n", "policy", "group", "bytes", "conc",
               "peers", "put us", "put+sig us", "put GB/s", "p+s GB/s", "effic.", "fences", "signals", "errors");
    printf("%-10s %-8s %9" PRIu64 " %5u %5u %12.1f %12.1f %10.4f %10.4f %6.1f%% %8.1f %8.1f %6" PRIu64 "\n", r->policy,
           r->group, r->bytes, r->concurrency, r->peers, r->put_only_us, r->put_signal_us, r->put_only_GBps,
           r->put_signal_GBps, 100 * r->efficiency, r->fences, r->signals, r->errors);
    fflush(stdout);
}

void report_simple(const struct simple_result *r, bool json, bool first)
{
    if (json) {
        printf(
            "{\"op\":\"%s\",\"mode\":\"%s\",\"policy\":\"%s\",\"bytes\":%" PRIu64 ",\"concurrency\":%u,\"peers\":%u,"
            "\"iterations\":%u,\"usec_p50\":%.2f,\"usec_p99\":%.2f,\"GBps\":%.4f,\"rate_Mps\":%.4f,\"errors\":%" PRIu64
            "}\n",
            r->op, r->mode, r->policy, r->bytes, r->concurrency, r->peers, r->iterations, r->usec_p50, r->usec_p99,
            r->GBps, r->rate_Mps, r->errors);
        fflush(stdout);
        return;
    }
    if (first)
        printf("%-9s %-11s %-10s %9s %5s %5s %10s %10s %10s %10s %6s\n", "op", "mode", "policy", "bytes", "conc",
               "peers", "p50 us", "p99 us", "GB/s", "M/s", "errors");
    printf("%-9s %-11s %-10s %9" PRIu64 " %5u %5u %10.2f %10.2f %10.4f %10.4f %6" PRIu64 "\n", r->op, r->mode,
           r->policy, r->bytes, r->concurrency, r->peers, r->usec_p50, r->usec_p99, r->GBps, r->rate_Mps, r->errors);
    fflush(stdout);
}

struct fit report_fit(const double *bytes, const double *us, uint32_t count)
{
    double mean_x = 0, mean_y = 0, xx = 0, xy = 0, yy = 0;
    struct fit fit = {0, 0, 0};

    for (uint32_t i = 0; i < count; i++) {
        mean_x += bytes[i] / count;
        mean_y += us[i] / count;
    }
    for (uint32_t i = 0; i < count; i++) {
        xx += (bytes[i] - mean_x) * (bytes[i] - mean_x);
        xy += (bytes[i] - mean_x) * (us[i] - mean_y);
        yy += (us[i] - mean_y) * (us[i] - mean_y);
    }
    if (xx <= 0 || yy <= 0 || xy <= 0)
        return fit;
    fit.alpha_us = mean_y - xy / xx * mean_x;
    fit.GBps = xx / xy / 1e3; /* bytes per us are MB/s */
    fit.r2 = xy * xy / (xx * yy);
    return fit;
}

static bool same_line(const struct putsignal_result *a, const struct putsignal_result *b, bool by_bytes)
{
    return strcmp(a->policy, b->policy) == 0 && strcmp(a->group, b->group) == 0 && a->peers == b->peers &&
           (by_bytes ? a->concurrency == b->concurrency : a->bytes == b->bytes);
}

void report_fits(const struct putsignal_result *results, uint32_t count, bool json)
{
    for (uint32_t i = 0; i < count; i++) {
        double bytes[32], us[32];
        uint32_t points = 0;
        bool seen = false;
        struct fit fit;

        for (uint32_t k = 0; k < i; k++)
            seen |= same_line(&results[k], &results[i], true);
        for (uint32_t k = i; k < count && !seen && points < 32; k++) {
            if (!same_line(&results[k], &results[i], true))
                continue;
            bytes[points] = (double)results[k].bytes * results[k].concurrency;
            us[points++] = results[k].put_signal_us;
        }
        if (seen || points < 2)
            continue;
        fit = report_fit(bytes, us, points);
        printf(json ? "{\"op\":\"fit\",\"policy\":\"%s\",\"group\":\"%s\",\"concurrency\":%u,\"peers\":%u,\"alpha_us\":"
                      "%.2f,"
                      "\"beta_GBps\":%.4f,\"r2\":%.5f}\n"
                    : "fit %-10s %-8s %u x %u peers: T = %.1f us + M / %.4f GB/s, R^2 %.4f\n",
               results[i].policy, results[i].group, results[i].concurrency, results[i].peers, fit.alpha_us, fit.GBps,
               fit.r2);
    }
}

/* ------------------------------------------------------------------------------------------------------------------
 * the plot */

enum { PLOT_WIDTH = 760, PLOT_HEIGHT = 440, LEFT = 60, RIGHT = 190, TOP = 40, BOTTOM = 50 };

static double plot_x(uint32_t concurrency, uint32_t most)
{
    return LEFT + (double)(PLOT_WIDTH - LEFT - RIGHT) * concurrency / most;
}

static double plot_y(double efficiency)
{
    if (efficiency > 1.1)
        efficiency = 1.1;
    return TOP + (PLOT_HEIGHT - TOP - BOTTOM) * (1 - efficiency / 1.1);
}

static void plot_axes(FILE *f, uint32_t most)
{
    fprintf(f,
            "<svg xmlns=\"http://www.w3.org/2000/svg\" width=\"%d\" height=\"%d\" font-family=\"sans-serif\" "
            "font-size=\"12\">\n<rect width=\"100%%\" height=\"100%%\" fill=\"white\"/>\n"
            "<text x=\"%d\" y=\"22\" font-size=\"15\">put+signal as a share of put only</text>\n",
            PLOT_WIDTH, PLOT_HEIGHT, LEFT);
    for (int percent = 0; percent <= 100; percent += 20)
        fprintf(f,
                "<line x1=\"%d\" x2=\"%d\" y1=\"%.1f\" y2=\"%.1f\" stroke=\"#ddd\"/>"
                "<text x=\"%d\" y=\"%.1f\" text-anchor=\"end\">%d %%</text>\n",
                LEFT, PLOT_WIDTH - RIGHT, plot_y(percent / 100.0), plot_y(percent / 100.0), LEFT - 6,
                plot_y(percent / 100.0) + 4, percent);
    for (int i = 0; i <= 4; i++)
        fprintf(f, "<text x=\"%.1f\" y=\"%d\" text-anchor=\"middle\">%u</text>\n", plot_x(most * (uint32_t)i / 4, most),
                PLOT_HEIGHT - BOTTOM + 18, most * (uint32_t)i / 4);
    fprintf(f, "<text x=\"%d\" y=\"%d\">transfers in flight together</text>\n", LEFT + 160, PLOT_HEIGHT - 12);
}

static void plot_line(FILE *f, const struct putsignal_result *results, uint32_t count, uint32_t first, uint32_t line,
                      uint32_t most)
{
    static const char *const colors[] = {"#c0392b", "#e67e22", "#2980b9", "#16a085",
                                         "#8e44ad", "#7f8c8d", "#2c3e50", "#d4ac0d"};
    const struct putsignal_result *head = &results[first];
    const char *color = colors[line % 8];

    fprintf(f, "<polyline fill=\"none\" stroke=\"%s\" stroke-width=\"2\" points=\"", color);
    for (uint32_t k = first; k < count; k++)
        if (same_line(&results[k], head, false))
            fprintf(f, "%.1f,%.1f ", plot_x(results[k].concurrency, most), plot_y(results[k].efficiency));
    fprintf(f, "\"/>\n");
    for (uint32_t k = first; k < count; k++)
        if (same_line(&results[k], head, false))
            fprintf(f, "<circle cx=\"%.1f\" cy=\"%.1f\" r=\"3\" fill=\"%s\"/>\n", plot_x(results[k].concurrency, most),
                    plot_y(results[k].efficiency), color);
    fprintf(f, "<text x=\"%d\" y=\"%u\" fill=\"%s\">%s, %s, %" PRIu64 " B</text>\n", PLOT_WIDTH - RIGHT + 10,
            TOP + 12 + line * 16, color, head->policy, head->group, head->bytes);
}

int report_plot(const char *file, const struct putsignal_result *results, uint32_t count)
{
    uint32_t most = 1, line = 0;
    FILE *f = fopen(file, "w");

    if (!f) {
        perror(file);
        return 1;
    }
    for (uint32_t i = 0; i < count; i++)
        if (results[i].concurrency > most)
            most = results[i].concurrency;
    plot_axes(f, most);
    for (uint32_t i = 0; i < count; i++) {
        bool seen = false;

        for (uint32_t k = 0; k < i; k++)
            seen |= same_line(&results[k], &results[i], false);
        if (!seen)
            plot_line(f, results, count, i, line++, most);
    }
    fprintf(f, "</svg>\n");
    return fclose(f) != 0;
}
