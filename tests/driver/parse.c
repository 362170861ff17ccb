/* The scenario language: each line starts with a keyword, which is looked up in the table at the end. */
#define _GNU_SOURCE
#include "parse.h"

#include <limits.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* The state of the parser. The caller holds the lock, so only one parse runs at a time. */
static struct {
    const char *path;
    int line;
    struct scenario *scenario;
    struct gpu *gpu;
    struct device *device;
} now;

__attribute__((format(printf, 1, 2), noreturn)) static void wrong(const char *format, ...) {
    char text[300];
    va_list arguments;
    va_start(arguments, format);
    vsnprintf(text, sizeof text, format, arguments);
    va_end(arguments);
    give_up("%s:%d: %s", now.path, now.line, text);
}

/* ---- pieces of a line -------------------------------------------------------------------- */

static char *next_word(char **rest) {
    char *word = *rest + strspn(*rest, " \t");
    if (!*word) return NULL;
    char *end = word + strcspn(word, " \t");
    *rest = *end ? end + 1 : end;
    *end = '\0';
    return word;
}

static char *needed_word(char **rest, const char *what) {
    char *word = next_word(rest);
    if (!word) wrong("%s is missing", what);
    return word;
}

static int to_number(const char *word, int least, int most) {
    char *end;
    long number = strtol(word, &end, 10);
    if (*end || end == word || number < least || number > most)
        wrong("'%s' is not a number from %d to %d", word, least, most);
    return number;
}

static void to_text(char *to, size_t size, const char *from) {
    if (!*from) wrong("text is missing");
    if (strlen(from) >= size) wrong("'%s' is too long", from);
    strcpy(to, from);
}

struct choice {
    const char *name;
    int value;
};

static int to_choice(const char *word, const struct choice *choices) {
    for (; choices->name; choices++)
        if (!strcmp(word, choices->name)) return choices->value;
    wrong("unknown word '%s'", word);
}

static struct place to_place(char *word) {
    struct place place = {.slot = NONE};
    char *colon = strchr(word, ':');
    if (colon) {
        *colon = '\0';
        place.slot = to_number(colon + 1, 0, SLOTS - 1);
    }
    place.gpu = to_number(word, 0, GPUS - 1);
    return place;
}

/* ---- keywords of GPUs and MIG instances -------------------------------------------------- */

/* Spread positions over all digits, so that UUIDs differ early and tests can use prefixes. */
static void default_uuid(char *uuid, const char *kind, unsigned position) {
    unsigned mixed = (position + 1) * 0x9e3779b9u;
    snprintf(uuid, TEXT, "%s-%08x-%04x-4%03x-8%03x-%012x", kind, mixed, mixed & 0xffff, mixed >> 20,
             mixed & 0xfff, position + 1);
}

static void open_device(struct device *device, int memory_mib) {
    device->there = true;
    device->memory_mib = memory_mib;
    device->gpu_instance = device->compute_instance = NONE;
    device->first_process = now.scenario->processes_count;
    now.device = device;
}

static void open_gpu(char *rest) {
    (void)rest;
    int position = now.scenario->gpus_count++;
    if (position == GPUS) wrong("more than %d GPUs", GPUS);
    now.gpu = &now.scenario->gpus[position];
    *now.gpu = (struct gpu){.bus = position + 1, .width = 16, .generation = 3, .temperature = 40, .power = 30,
                            .power_limit = 250, .speed = 10, .minor = position, .numa = NONE, .addressing = NONE,
                            .slots = NONE, .major_capability = 8, .use_ended_s = NONE};
    open_device(&now.gpu->whole, 8192);
    strcpy(now.gpu->whole.name, "NVIDIA Stand-in");
    strcpy(now.gpu->vbios, "86.07.22.00.A8");
    default_uuid(now.gpu->whole.uuid, "GPU", position);
}

static void open_instance(char *rest) {
    int slot = to_number(needed_word(&rest, "the slot"), 0, SLOTS - 1);
    int position = now.gpu - now.scenario->gpus;
    if (now.gpu->instances[slot].there) wrong("instance %d is described twice", slot);
    open_device(&now.gpu->instances[slot], 4864);
    snprintf(now.device->name, TEXT, "%.80s MIG 1g.5gb", now.gpu->whole.name);
    now.device->gpu_instance = slot + 7;
    now.device->compute_instance = 0;
    default_uuid(now.device->uuid, "MIG", 100 * (position + 1) + slot);
}

/* ---- keywords with several values -------------------------------------------------------- */

static void read_bus(char *rest) {
    struct gpu *gpu = now.gpu;
    if (sscanf(rest, "%x:%x:%x.%x", &gpu->domain, &gpu->bus, &gpu->slot, &gpu->function) != 4)
        wrong("'%s' is not like 0000:03:00.0", rest);
}

static void read_capability(char *rest) {
    if (sscanf(rest, "%d.%d", &now.gpu->major_capability, &now.gpu->minor_capability) != 2)
        wrong("'%s' is not like 8.0", rest);
}

static void read_process(enum kind kind, char *rest) {
    struct scenario *scenario = now.scenario;
    if (scenario->processes_count == PROCESSES) wrong("more than %d processes", PROCESSES);
    struct process *process = &scenario->processes[scenario->processes_count++];
    now.device->processes_count++;
    process->kind = kind;
    process->pid = to_number(needed_word(&rest, "the pid"), 1, INT_MAX);
    char *mib = needed_word(&rest, "the memory in MiB"), *last = next_word(&rest);
    process->mib = strcmp(mib, "-") ? to_number(mib, 0, INT_MAX) : NONE;
    if (last && strcmp(last, "until-dead")) wrong("unknown word '%s'", last);
    process->until_dead = last != NULL;
}

static void read_compute(char *rest) { read_process(COMPUTE, rest); }
static void read_graphics(char *rest) { read_process(GRAPHICS, rest); }
static void read_mps(char *rest) { read_process(MPS, rest); }
static void read_managed(char *rest) { read_process(MANAGED, rest); }

/* A virtual machine's GPU can have an empty VBIOS version. */
static void read_vbios(char *rest) {
    to_text(now.gpu->vbios, TEXT, rest);
    if (!strcmp(rest, "empty")) *now.gpu->vbios = '\0';
}

/* The other GPU may not be described yet, so links are made symmetric after parsing. */
static void read_link(char *rest) {
    enum { NVLINK = 1 };
    static const struct choice choices[] = {{"nvlink", NVLINK}, {"switch", SWITCH}, {"switches", SWITCHES},
                                            {"host", HOST}, {"node", NODE}, {"system", SYSTEM}, {0}};
    int other = to_number(needed_word(&rest, "the other GPU"), 0, GPUS - 1);
    int link = to_choice(needed_word(&rest, "the kind of link"), choices);
    if (link == NVLINK) now.gpu->nvlink[other] = true;
    else now.gpu->links[other] = link;
}

static struct rule *read_rule(int what, char **rest) {
    struct scenario *scenario = now.scenario;
    if (scenario->rules_count == RULES) wrong("more than %d rules", RULES);
    struct rule *rule = &scenario->rules[scenario->rules_count++];
    rule->what = what;
    to_text(rule->function, NAME, needed_word(rest, "the function"));
    char *where = needed_word(rest, "the GPU, or *");
    rule->everywhere = !strcmp(where, "*");
    if (!rule->everywhere) rule->place = to_place(where);
    return rule;
}

static void read_fail(char *rest) {
    struct rule *rule = read_rule(FAIL, &rest);
    rule->code = to_number(needed_word(&rest, "the code"), 1, 999);
}

static void read_wait(int what, char *rest) {
    struct rule *rule = read_rule(what, &rest);
    char *word = needed_word(&rest, "the seconds"), *end;
    rule->seconds = strtod(word, &end);
    if (*end || !(rule->seconds >= 0)) wrong("'%s' is not a number of seconds", word);
}

static void read_delay(char *rest) { read_wait(DELAY, rest); }
static void read_delay_first(char *rest) { read_wait(DELAY_FIRST, rest); }

static void read_stuck(char *rest) {
    struct rule *rule = read_rule(STUCK, &rest);
    to_text(rule->path, sizeof rule->path, rest + strspn(rest, " \t"));
}

/* The Python builder omits the symbol from the library, so the parser only checks the line. */
static void read_missing(char *rest) { needed_word(&rest, "the function"); }

static void read_contexts(char *rest) {
    const char *slash = strrchr(now.path, '/');
    int folder = slash && *rest != '/' ? slash - now.path + 1 : 0;
    if (!*rest) wrong("the folder is missing");
    snprintf(now.scenario->contexts, PATH, "%.*s%s", folder, now.path, rest);
}

static void read_freeing(char *rest) {
    static const struct choice ways[] = {{"gradually", true}, {"at-once", false}, {0}};
    static const struct choice listings[] = {{"listed", true}, {"unlisted", false}, {0}};
    struct freeing *freeing = &now.scenario->freeing;
    char *word = needed_word(&rest, "the seconds"), *end;
    freeing->seconds = strtod(word, &end);
    if (*end || !(freeing->seconds >= 0)) wrong("'%s' is not a number of seconds", word);
    freeing->is_gradual = to_choice(needed_word(&rest, "gradually or at-once"), ways);
    freeing->is_listed = to_choice(needed_word(&rest, "listed or unlisted"), listings);
}

/* ---- the table --------------------------------------------------------------------------- */

static const struct choice modes[] = {{"default", DEFAULT}, {"exclusive_thread", EXCLUSIVE_THREAD},
                                      {"prohibited", PROHIBITED}, {"exclusive_process", EXCLUSIVE_PROCESS}, {0}};
static const struct choice migs[] = {{"off", MIG_OFF}, {"on", MIG_ON}, {"none", MIG_UNKNOWN}, {0}};

static const struct choice conf_computes[] = {{"none", CONF_NONE}, {"off", CONF_OFF}, {"on", CONF_ON},
                                              {"protected-pcie", CONF_PROTECTED_PCIE}, {0}};
static const struct choice samples[] = {{"epoch", EPOCH}, {"boot", BOOT}, {"monotonic", MONOTONIC},
                                        {"offset", OFFSET}, {"strange", STRANGE}, {"rubbish", RUBBISH},
                                        {"none", EMPTY}, {0}};

enum scope { OF_MACHINE, OF_GPU, OF_DEVICE, OF_INSTANCE };
enum value { CALL, NUMBER, NUMBER_OR_NONE, STRING, CHOICE };

static const struct word {
    const char *name;
    enum scope scope;
    enum value value;
    size_t offset;                       /* offset in the struct of the scope */
    void (*call)(char *rest);
    const struct choice *choices;
} words[] = {
    {"driver", OF_MACHINE, STRING, offsetof(struct scenario, driver), NULL, NULL},
    {"cuda", OF_MACHINE, NUMBER, offsetof(struct scenario, cuda), NULL, NULL},
    {"count", OF_MACHINE, NUMBER, offsetof(struct scenario, count), NULL, NULL},
    {"contexts", OF_MACHINE, CALL, 0, read_contexts, NULL},
    {"context", OF_MACHINE, NUMBER, offsetof(struct scenario, context_mib), NULL, NULL},
    {"conf-compute", OF_MACHINE, CHOICE, offsetof(struct scenario, conf_compute), NULL, conf_computes},
    {"conf-compute-ready", OF_MACHINE, NUMBER, offsetof(struct scenario, conf_compute_ready), NULL, NULL},
    {"freeing", OF_MACHINE, CALL, 0, read_freeing, NULL},
    {"fail", OF_MACHINE, CALL, 0, read_fail, NULL},
    {"delay", OF_MACHINE, CALL, 0, read_delay, NULL},
    {"delay-first", OF_MACHINE, CALL, 0, read_delay_first, NULL},
    {"stuck", OF_MACHINE, CALL, 0, read_stuck, NULL},
    {"missing", OF_MACHINE, CALL, 0, read_missing, NULL},
    {"gpu", OF_MACHINE, CALL, 0, open_gpu, NULL},
    {"instance", OF_GPU, CALL, 0, open_instance, NULL},
    {"bus", OF_GPU, CALL, 0, read_bus, NULL},
    {"capability", OF_GPU, CALL, 0, read_capability, NULL},
    {"link", OF_GPU, CALL, 0, read_link, NULL},
    {"vbios", OF_GPU, CALL, 0, read_vbios, NULL},
    {"width", OF_GPU, NUMBER_OR_NONE, offsetof(struct gpu, width), NULL, NULL},
    {"generation", OF_GPU, NUMBER_OR_NONE, offsetof(struct gpu, generation), NULL, NULL},
    {"mode", OF_GPU, CHOICE, offsetof(struct gpu, mode), NULL, modes},
    {"mig", OF_GPU, CHOICE, offsetof(struct gpu, mig), NULL, migs},
    {"samples", OF_GPU, CHOICE, offsetof(struct gpu, samples), NULL, samples},
    {"use-ended", OF_GPU, NUMBER, offsetof(struct gpu, use_ended_s), NULL, NULL},
    {"slots", OF_GPU, NUMBER, offsetof(struct gpu, slots), NULL, NULL},
    {"utilisation", OF_GPU, NUMBER_OR_NONE, offsetof(struct gpu, utilisation), NULL, NULL},
    {"temperature", OF_GPU, NUMBER_OR_NONE, offsetof(struct gpu, temperature), NULL, NULL},
    {"power", OF_GPU, NUMBER_OR_NONE, offsetof(struct gpu, power), NULL, NULL},
    {"power-limit", OF_GPU, NUMBER_OR_NONE, offsetof(struct gpu, power_limit), NULL, NULL},
    {"speed", OF_GPU, NUMBER, offsetof(struct gpu, speed), NULL, NULL},
    {"minor", OF_GPU, NUMBER_OR_NONE, offsetof(struct gpu, minor), NULL, NULL},
    {"numa", OF_GPU, NUMBER_OR_NONE, offsetof(struct gpu, numa), NULL, NULL},
    {"addressing", OF_GPU, NUMBER_OR_NONE, offsetof(struct gpu, addressing), NULL, NULL},
    {"remap-pending", OF_GPU, NUMBER_OR_NONE, offsetof(struct gpu, remap_pending), NULL, NULL},
    {"remap-failed", OF_GPU, NUMBER_OR_NONE, offsetof(struct gpu, remap_failed), NULL, NULL},
    {"screen", OF_GPU, NUMBER, offsetof(struct gpu, screen), NULL, NULL},
    {"recovery", OF_GPU, NUMBER_OR_NONE, offsetof(struct gpu, recovery), NULL, NULL},
    {"name", OF_DEVICE, STRING, offsetof(struct device, name), NULL, NULL},
    {"uuid", OF_DEVICE, STRING, offsetof(struct device, uuid), NULL, NULL},
    {"memory", OF_DEVICE, NUMBER_OR_NONE, offsetof(struct device, memory_mib), NULL, NULL},
    {"reserved", OF_DEVICE, NUMBER, offsetof(struct device, reserved_mib), NULL, NULL},
    {"limit", OF_DEVICE, NUMBER, offsetof(struct device, limit_mib), NULL, NULL},
    {"used", OF_DEVICE, NUMBER, offsetof(struct device, used_mib), NULL, NULL},
    {"compute", OF_DEVICE, CALL, 0, read_compute, NULL},
    {"graphics", OF_DEVICE, CALL, 0, read_graphics, NULL},
    {"mps", OF_DEVICE, CALL, 0, read_mps, NULL},
    {"managed", OF_DEVICE, CALL, 0, read_managed, NULL},
    {"gi", OF_INSTANCE, NUMBER, offsetof(struct device, gpu_instance), NULL, NULL},
    {"ci", OF_INSTANCE, NUMBER, offsetof(struct device, compute_instance), NULL, NULL},
};

static const struct word *find_word(const char *name) {
    for (size_t i = 0; i < sizeof words / sizeof *words; i++)
        if (!strcmp(words[i].name, name)) return &words[i];
    wrong("unknown word '%s'", name);
}

static char *target(const struct word *word) {
    bool in_instance = now.gpu && now.device != &now.gpu->whole;
    if (word->scope != OF_MACHINE && !now.gpu) wrong("'%s' before any gpu", word->name);
    if (word->scope == OF_INSTANCE && !in_instance) wrong("'%s' belongs to an instance", word->name);
    if (word->scope == OF_MACHINE) return (char *)now.scenario;
    return word->scope == OF_GPU ? (char *)now.gpu : (char *)now.device;
}

static void read_line(char *line) {
    line[strcspn(line, "#")] = '\0';
    for (size_t end = strlen(line); end && strchr(" \t\r", line[end - 1]);) line[--end] = '\0';
    char *name = next_word(&line);
    if (!name) return;
    const struct word *word = find_word(name);
    void *to = target(word) + word->offset;
    line += strspn(line, " \t");
    if (word->value == CALL) word->call(line);
    else if (word->value == STRING) to_text(to, TEXT, line);
    else if (word->value == CHOICE) *(int *)to = to_choice(line, word->choices);
    else if (word->value == NUMBER_OR_NONE && !strcmp(line, "none")) *(int *)to = NONE;
    else *(int *)to = to_number(line, 0, INT_MAX);
}

/* ---- the whole file ---------------------------------------------------------------------- */

static void finish_links(struct scenario *scenario) {
    for (int a = 0; a < scenario->gpus_count; a++)
        for (int b = 0; b < scenario->gpus_count; b++) {
            struct gpu *one = &scenario->gpus[a], *other = &scenario->gpus[b];
            if (one->nvlink[b]) other->nvlink[a] = true;
            if (one->links[b]) other->links[a] = one->links[b];
        }
}

void parse_scenario(const char *path, char *text, struct scenario *into) {
    memset(into, 0, sizeof *into);
    strcpy(into->driver, "550.54.15");
    into->cuda = 12040;
    into->context_mib = 300;
    into->count = NONE;
    now.path = path;
    now.scenario = into;
    now.gpu = NULL;
    now.device = NULL;
    now.line = 0;
    for (char *line; (line = strsep(&text, "\n"));) {
        now.line++;
        read_line(line);
    }
    for (int i = 0; i < into->gpus_count; i++)
        if (into->gpus[i].slots == NONE) into->gpus[i].slots = into->gpus[i].mig == MIG_ON ? 7 : 0;
    finish_links(into);
}
