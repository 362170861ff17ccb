/* A stand-in `nvidia-smi --query-gpu=...`, as far as GPUtil asks: it loads the NVML that it finds, as the real one
 * does, and does nothing else, so it is faster than the real one. */
#include <dlfcn.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

typedef void *handle_t;

struct memory_v2 {
    unsigned version;
    unsigned long long total, reserved, free, used;
};

struct utilisation {
    unsigned gpu, memory;
};

static void *library;

static void give_up(const char *what) {
    fprintf(stderr, "nvidia-smi: %s\n", what);
    exit(9);
}

static void *find(const char *function) {
    void *found = dlsym(library, function);
    if (!found) give_up(function);
    return found;
}

/* Calls FUNCTION of the NVML, whose arguments behind the parentheses are of the TYPES given. */
#define NVML(function, types) ((int (*) types)find(#function))

static void print_text(int code, const char *text) { fputs(code ? "[N/A]" : text, stdout); }

/* By address: the call that fills it in may be an argument beside it. */
static void print_number(int code, const unsigned *number) {
    if (code) fputs("[N/A]", stdout);
    else printf("%u", *number);
}

static void print_memory(handle_t gpu, const char *part) {
    struct memory_v2 memory = {.version = sizeof memory | 2 << 24};
    int code = NVML(nvmlDeviceGetMemoryInfo_v2, (handle_t, struct memory_v2 *))(gpu, &memory);
    unsigned long long bytes = !strcmp(part, "total") ? memory.total : !strcmp(part, "used") ? memory.used : memory.free;
    unsigned mib = bytes >> 20;
    print_number(code, &mib);
}

static void print_field(const char *field, unsigned index, handle_t gpu) {
    char text[96] = "";
    unsigned number = 0;
    struct utilisation rates = {0};
    if (!strcmp(field, "index")) print_number(0, &index);
    else if (!strcmp(field, "uuid")) print_text(NVML(nvmlDeviceGetUUID, (handle_t, char *, unsigned))(gpu, text, 96), text);
    else if (!strcmp(field, "name")) print_text(NVML(nvmlDeviceGetName, (handle_t, char *, unsigned))(gpu, text, 96), text);
    else if (!strcmp(field, "gpu_serial"))
        print_text(NVML(nvmlDeviceGetSerial, (handle_t, char *, unsigned))(gpu, text, 96), text);
    else if (!strcmp(field, "driver_version"))
        print_text(NVML(nvmlSystemGetDriverVersion, (char *, unsigned))(text, 96), text);
    else if (!strcmp(field, "utilization.gpu"))
        print_number(NVML(nvmlDeviceGetUtilizationRates, (handle_t, struct utilisation *))(gpu, &rates), &rates.gpu);
    else if (!strcmp(field, "temperature.gpu"))
        print_number(NVML(nvmlDeviceGetTemperature, (handle_t, unsigned, unsigned *))(gpu, 0, &number), &number);
    else if (!strncmp(field, "memory.", 7)) print_memory(gpu, field + 7);
    else if (!strncmp(field, "display_", 8)) fputs("Disabled", stdout);
    else give_up(field);
}

static void print_gpu(unsigned index, const char *fields) {
    char copy[1024];
    handle_t gpu;
    if (NVML(nvmlDeviceGetHandleByIndex_v2, (unsigned, handle_t *))(index, &gpu)) return;
    snprintf(copy, sizeof copy, "%s", fields);
    for (char *field = strtok(copy, ","), *comma = ""; field; field = strtok(NULL, ","), comma = ", ") {
        fputs(comma, stdout);
        print_field(field, index, gpu);
    }
    putchar('\n');
}

int main(int count, char **arguments) {
    const char *query = "--query-gpu=";
    unsigned gpus = 0;
    if (count != 3 || strncmp(arguments[1], query, strlen(query)) || strcmp(arguments[2], "--format=csv,noheader,nounits"))
        give_up("only --query-gpu=... --format=csv,noheader,nounits");
    library = dlopen("libnvidia-ml.so.1", RTLD_NOW);
    if (!library) give_up(dlerror());
    if (NVML(nvmlInit_v2, (void))() || NVML(nvmlDeviceGetCount_v2, (unsigned *))(&gpus)) give_up("no driver");
    for (unsigned index = 0; index < gpus; index++) print_gpu(index, arguments[1] + strlen(query));
    return NVML(nvmlShutdown, (void))();
}
