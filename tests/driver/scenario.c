/* The steps of every call in both libraries: read the scenario, log, wait, fail. */
#define _GNU_SOURCE
#include "scenario.h"

#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <signal.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

#include "parse.h"

const struct scenario *machine;
static char read_from[PATH];                       /* the scenario file of `machine` */
static int first_calls_count;                      /* number of calls that delay-first has recorded */
static pthread_mutex_t mutex = PTHREAD_MUTEX_INITIALIZER;

void give_up(const char *format, ...) {
    va_list arguments;
    va_start(arguments, format);
    fputs("stand-in driver: ", stderr);
    vfprintf(stderr, format, arguments);
    fputc('\n', stderr);
    va_end(arguments);
    abort();
}

static void lock(void) { pthread_mutex_lock(&mutex); }
static void unlock(void) { pthread_mutex_unlock(&mutex); }

/* Hold the lock during fork, so that the child never inherits a lock of another thread. */
__attribute__((constructor)) static void be_fork_safe(void) { pthread_atfork(lock, unlock, unlock); }

/* ---- reading the file -------------------------------------------------------------------- */

enum { FILE_SIZE = 1 << 18 };

static ssize_t read_whole(int file, char *into) {
    ssize_t length = 0, got;
    while ((got = read(file, into + length, FILE_SIZE - length)) != 0) {
        if (got < 0 && errno == EINTR) continue;
        if (got < 0) return -1;
        length += got;
    }
    return length;
}

/* Read the file through one descriptor, so that a file replaced by rename is read old or new, never mixed. */
static void read_machine(void) {
    static char fresh[FILE_SIZE], seen[FILE_SIZE];
    static ssize_t seen_length = -1;
    static struct scenario parsed;
    const char *path = getenv("STAND_IN_SCENARIO");
    int file = path && *path ? open(path, O_RDONLY | O_CLOEXEC) : -1;
    ssize_t length = file < 0 ? -1 : read_whole(file, fresh);
    if (file >= 0) close(file);
    if (length < 0) return;  /* the file was deleted; keep the last machine */
    if (length == FILE_SIZE) give_up("%s is too long", path);
    bool is_same_path = !strcmp(path, read_from);
    if (length == seen_length && !memcmp(fresh, seen, length) && is_same_path) return;
    if (!is_same_path) first_calls_count = 0;  /* another machine: its GPUs are not initialized */
    memcpy(seen, fresh, length);
    seen_length = length;
    snprintf(read_from, sizeof read_from, "%s", path);
    fresh[length] = '\0';
    parse_scenario(path, fresh, &parsed);
    machine = &parsed;
}

void enter_call(void) {
    lock();
    read_machine();
}

void leave_call(void) { unlock(); }

const struct device *device_at(struct place place) {
    if (!machine || place.gpu < 0 || place.gpu >= machine->gpus_count) return NULL;
    const struct gpu *gpu = &machine->gpus[place.gpu];
    if (place.slot < 0) return &gpu->whole;
    if (gpu->mig != MIG_ON || place.slot >= SLOTS) return NULL;
    return gpu->instances[place.slot].there ? &gpu->instances[place.slot] : NULL;
}

/* ---- log --------------------------------------------------------------------------------- */

static void log_call(const char *function, struct place place) {
    const char *path = getenv("STAND_IN_LOG");
    if (!path || !*path) return;
    char where[32] = "", line[160];
    if (place.gpu >= 0 && place.slot >= 0) snprintf(where, sizeof where, " %d:%d", place.gpu, place.slot);
    else if (place.gpu >= 0) snprintf(where, sizeof where, " %d", place.gpu);
    int length = snprintf(line, sizeof line, "%d %s%s\n", getpid(), function, where);
    int file = open(path, O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC, 0666);
    if (file < 0 || write(file, line, length) != length) give_up("cannot write to %s: %m", path);
    close(file);
}

/* ---- rules ------------------------------------------------------------------------------- */

/* The handle of an instance comes from its GPU, so a rule about either one applies. */
static bool is_asked_of_parent(const char *function) {
    return !strcmp(function, "nvmlDeviceGetMigDeviceHandleByIndex");
}

static bool applies(const struct rule *rule, const char *function, struct place place) {
    if (strcmp(rule->function, function)) return false;
    if (rule->everywhere) return true;
    if (rule->place.gpu != place.gpu) return false;
    return rule->place.slot == place.slot || (rule->place.slot < 0 && is_asked_of_parent(function));
}

/* Recorded by function and place, because the rules may change between calls. */
static bool is_first_time(const char *function, struct place place) {
    static struct { char function[NAME]; struct place place; } done[512];
    static pid_t owner;
    if (owner != getpid()) first_calls_count = 0;  /* a forked child initializes its own GPUs */
    owner = getpid();
    for (int i = 0; i < first_calls_count; i++)
        if (!strcmp(done[i].function, function) && done[i].place.gpu == place.gpu && done[i].place.slot == place.slot)
            return false;
    if (first_calls_count == 512) give_up("too many delay-first");
    snprintf(done[first_calls_count].function, NAME, "%s", function);
    done[first_calls_count++].place = place;
    return true;
}

static double seconds_to_wait(const char *function, struct place place) {
    double seconds = 0;
    bool has_first = false;
    for (int i = 0; machine && i < machine->rules_count; i++) {
        const struct rule *rule = &machine->rules[i];
        if (rule->what == FAIL || rule->what == STUCK || !applies(rule, function, place)) continue;
        if (rule->what == DELAY_FIRST && !has_first && !is_first_time(function, place)) continue;
        has_first |= rule->what == DELAY_FIRST;
        seconds += rule->seconds;
    }
    return seconds;
}

enum { SECOND = 1000000000, SLICE = SECOND / 50 };  /* nanoseconds */

static long long now(void) {
    struct timespec time;
    clock_gettime(CLOCK_MONOTONIC, &time);
    return time.tv_sec * (long long)SECOND + time.tv_nsec;
}

/* Wait until a fixed time, so that signals do not change the delay. Wait in short steps and stop when the scenario is
   deleted: a test of a hanging driver deletes it at the end, so that no thread keeps waiting. */
static void wait_seconds(const char *scenario, double seconds) {
    long long end = now() + (long long)(seconds * SECOND), time;
    while ((time = now()) < end && !access(scenario, F_OK)) {
        long long until = end - time < SLICE ? end : time + SLICE;
        struct timespec moment = {until / SECOND, until % SECOND};
        while (clock_nanosleep(CLOCK_MONOTONIC, TIMER_ABSTIME, &moment, NULL) == EINTR) continue;
    }
}

/* Write to a file without the lock. If the file system is frozen, the thread stays in uninterruptible sleep (D). */
static void get_stuck(const struct rule *rule) {
    char path[sizeof rule->path];
    strcpy(path, rule->path);
    leave_call();
    int file = open(path, O_WRONLY | O_CLOEXEC);
    if (file < 0 || write(file, "", 1) != 1) give_up("cannot write to %s: %m", path);
    close(file);
    enter_call();
}

int obey_rules(const char *function, struct place place) {
    log_call(function, place);
    double seconds = seconds_to_wait(function, place);
    if (seconds > 0) {
        char scenario[PATH];
        snprintf(scenario, sizeof scenario, "%s", read_from);
        leave_call();
        wait_seconds(scenario, seconds);
        enter_call();
    }
    for (int i = 0; machine && i < machine->rules_count; i++)
        if (machine->rules[i].what == STUCK && applies(&machine->rules[i], function, place))
            get_stuck(&machine->rules[i]);
    for (int i = 0; machine && i < machine->rules_count; i++)
        if (machine->rules[i].what == FAIL && applies(&machine->rules[i], function, place))
            return machine->rules[i].code;
    return 0;
}

/* ---- processes --------------------------------------------------------------------------- */

/* A zombie holds no GPU, though kill() still finds it. */
static bool is_zombie(pid_t pid) {
    char path[40], text[512];
    snprintf(path, sizeof path, "/proc/%d/stat", pid);
    int file = open(path, O_RDONLY | O_CLOEXEC);
    if (file < 0) return false;
    ssize_t length = read(file, text, sizeof text - 1);
    close(file);
    text[length < 0 ? 0 : length] = '\0';
    const char *after_name = strrchr(text, ')');  /* the process name may contain parentheses */
    return after_name && strlen(after_name) > 2 && strchr("ZX", after_name[2]);
}

bool is_alive(pid_t pid) { return (kill(pid, 0) == 0 || errno == EPERM) && !is_zombie(pid); }

/* Return the fraction of a process's memory that is still in use. The memory of a process that has ended is freed from
   the first call that finds it ended; that call creates the file PID.ended. */
static double fraction_left(const char *path, pid_t pid) {
    char mark[PATH + 320];
    struct stat status;
    struct timespec time;
    snprintf(mark, sizeof mark, "%s.ended", path);
    if (is_alive(pid)) return 1;
    if (!machine->freeing.seconds) return 0;
    int file = open(mark, O_RDONLY | O_CREAT | O_CLOEXEC, 0666);
    if (file < 0 || fstat(file, &status)) give_up("contexts %s: %m", mark);
    close(file);
    clock_gettime(CLOCK_REALTIME, &time);
    double passed = time.tv_sec - status.st_mtim.tv_sec + (time.tv_nsec - status.st_mtim.tv_nsec) / 1e9;
    if (passed >= machine->freeing.seconds) return 0;
    return machine->freeing.is_gradual && passed > 0 ? 1 - passed / machine->freeing.seconds : 1;
}

static void each_line_of(const char *path, pid_t pid, const char *uuid,
                         void (*each)(void *, struct process), void *to) {
    char line[2 * TEXT], on[TEXT];
    int mib, managed_mib;
    double left = fraction_left(path, pid);
    if (!(left > 0)) return;
    bool is_unlisted = !machine->freeing.is_listed && !is_alive(pid);
    FILE *file = fopen(path, "re");
    if (!file) return;  /* its process has just closed the context */
    while (fgets(line, sizeof line, file))
        if (sscanf(line, "%95s %d %d", on, &mib, &managed_mib) == 3 && !strcmp(on, uuid)) {
            each(to, (struct process){.kind = COMPUTE, .pid = pid, .mib = left * mib, .is_unlisted = is_unlisted});
            each(to, (struct process){.kind = MANAGED, .pid = pid, .mib = left * managed_mib});
        }
    fclose(file);
}

void each_context(const char *uuid, void (*each)(void *, struct process), void *to) {
    if (!*machine->contexts) return;
    DIR *folder = opendir(machine->contexts);
    if (!folder) give_up("contexts %s: %m", machine->contexts);
    for (struct dirent *entry; (entry = readdir(folder));) {
        char *end, path[PATH + 300];
        long pid = strtol(entry->d_name, &end, 10);
        if (*end || pid <= 0) continue;
        snprintf(path, sizeof path, "%s/%s", machine->contexts, entry->d_name);
        each_line_of(path, pid, uuid, each, to);
    }
    closedir(folder);
}

/* ---- memory ------------------------------------------------------------------------------ */

struct sum {
    long mib;
    pid_t except;
};

static void add_mib(void *to, struct process process) {
    struct sum *sum = to;
    if (process.mib != NONE && process.pid != sum->except) sum->mib += process.mib;
}

/* A process that computes and draws is in both lists with the same memory. Its managed memory is in neither. */
static bool is_counted(const struct process *first, int i) {
    if (first[i].kind == MANAGED) return false;
    for (int before = 0; before < i; before++)
        if (first[before].pid == first[i].pid && first[before].kind != first[i].kind && first[before].kind != MANAGED)
            return true;
    return false;
}

static void add_device(struct sum *sum, const struct device *device) {
    const struct process *first = &machine->processes[device->first_process];
    sum->mib += device->used_mib;
    for (int i = 0; i < device->processes_count; i++)
        if (first[i].mib != NONE && !is_counted(first, i) && (!first[i].until_dead || is_alive(first[i].pid)))
            sum->mib += first[i].mib;
    each_context(device->uuid, add_mib, sum);
}

long used_mib(struct place place, pid_t except) {
    struct sum sum = {0, except};
    add_device(&sum, device_at(place));
    for (int slot = 0; place.slot < 0 && slot < SLOTS; slot++) {
        const struct device *instance = device_at((struct place){place.gpu, slot});
        if (instance) add_device(&sum, instance);
    }
    return sum.mib;
}
