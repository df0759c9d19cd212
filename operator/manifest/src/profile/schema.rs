//! What may stand in a profile, in the words of the definition of MoeJobs: one reader for both.

use moejob_protocol::topology::SPEEDS;
use serde_json::{Value as Json, json};

/// The checks of a node that a profile may set limits for. The unit ends the name.
pub const CHECKS: &[(&str, &str)] = &[
    ("hostToDeviceGBps", "Copies from host memory to a GPU"),
    ("deviceToHostGBps", "Copies from a GPU to host memory"),
    ("peerReadGBps", "Reads of one GPU's memory by another of the node"),
    ("allReduceGBps", "Bus bandwidth of an all-reduce of all GPUs of the node, 16 GiB"),
    ("plainAllReduceGBps", "The same without NVLink multicast, which is how jobs run on Hopper"),
    ("ibLoopbackGBps", "The same where it goes by the InfiniBand cards"),
    ("gpuDirectWriteGbps", "Writes by an InfiniBand card from GPU memory, Gb/s"),
    ("pairAllReduceGBps", "Bus bandwidth of an all-reduce of two nodes, 8 GiB"),
    ("deviceCopyGBps", "Copies within the memory of one GPU"),
    ("hostCopyGBps", "Copies within the memory of one NUMA node, by its processors"),
];

pub fn schema() -> Json {
    let text = |most: u32, about: &str| {
        json!({ "description": about, "type": "string", "minLength": 1, "maxLength": most })
    };
    let texts = |most: u32| {
        let value = json!({ "type": "string", "maxLength": 253 });
        json!({ "type": "object", "maxProperties": most, "additionalProperties": value })
    };
    let whole = |least: u64, most: u64, about: &str| {
        json!({ "description": about, "type": "integer", "minimum": least, "maximum": most })
    };
    let list = |of: Json, most: u32| json!({ "type": "array", "maxItems": most, "items": of });
    let limit = |about: &str| {
        let number = json!({ "type": "number", "minimum": 0, "exclusiveMinimum": true });
        json!({
            "description": about,
            "type": "object",
            "required": ["fail"],
            "properties": { "fail": number, "warn": number },
        })
    };
    let above = |about: &str| {
        json!({
            "description": about,
            "type": "number",
            "minimum": 0,
            "exclusiveMinimum": true,
            "maximum": 1e9,
        })
    };
    let line = |about: &str| {
        let properties = json!({
            "us": above("Microseconds before the first byte arrives"),
            "GBps": above("GB/s from then on"),
        });
        json!({
            "description": about,
            "type": "object",
            "required": ["us", "GBps"],
            "properties": properties,
        })
    };
    let lines = || list(line("A protocol; the one that is fastest for a size carries it"), 8);
    let checks = CHECKS.iter().map(|(name, about)| (name.to_string(), limit(about)));
    let pci = text(12, "A PCI address, as 0001:00:00.0");
    json!({
        "type": "object",
        "required": ["version", "backend", "devices"],
        "properties": {
            "version": whole(1, 1, "1, the version of this form"),
            "about": text(200, "The machine, for a person"),
            "selector": texts(32),
            "backend": {
                "description": "What a rank computes on: cpu or cuda",
                "type": "string",
                "enum": ["cpu", "cuda"],
            },
            "devices": {
                "description": "GPUs of a node, or with backend cpu the ranks that share it",
                "x-kubernetes-int-or-string": true,
                "x-kubernetes-validations": [{ "message": "a whole number, 1 to 64, or auto" }],
            },
            "memory": text(32, "Memory of a device, as 80Gi"),
            "reserved": text(32, "Of it, what a rank may not use"),
            "nvlinkDomain": whole(1, 1024, "Devices that reach each other by NVLink"),
            "numa": list(json!({
                "type": "object",
                "required": ["cpus"],
                "properties": {
                    "cpus": text(256, "Processors, as 0-23,96-119"),
                    "gpus": list(pci.clone(), 64),
                    "hcas": list(pci, 64),
                },
            }), 64),
            "rdma": {
                "type": "object",
                "required": ["resource", "count"],
                "properties": {
                    "resource": text(253, "An extended resource, as rdma/ib"),
                    "count": whole(1, 64, "How many of it a pod asks for"),
                },
            },
            "resources": texts(16),
            "env": list(json!({
                "type": "object",
                "required": ["name", "value", "why"],
                "properties": {
                    "name": text(128, "The name of a variable"),
                    "value": text(1024, "Its value, in quotes where it is a number"),
                    "why": text(200, "Why the machine wants it"),
                },
            }), 64),
            "pci": {
                "description": "PCI as the machine's kernel does not show it",
                "type": "object",
                "required": ["switches", "speed", "width"],
                "properties": {
                    "switches": whole(1, 16, "Switches of a NUMA node"),
                    "speed": {
                        "description": "Of a lane, as 16 GT/s",
                        "type": "string",
                        "enum": SPEEDS,
                    },
                    "width": whole(1, 32, "Lanes of a link"),
                },
            },
            "topologyFile": text(1024, "generated, or a path in the worker's image"),
            "price": above("What a node costs an hour, in whatever money"),
            "flops": {
                "description": "What a rank computes: estimates of a step's time rest on it",
                "type": "object",
                "required": ["reached"],
                "properties": {
                    "bf16Tflops": above("Dense bf16 rate of a GPU by its data sheet, TFLOP/s"),
                    "fp32Tflops": above("Rate of fp32 of a rank's processors, TFLOP/s"),
                    "reached": {
                        "description": "The part of it that training reaches",
                        "type": "number",
                        "minimum": 0,
                        "exclusiveMinimum": true,
                        "maximum": 1,
                    },
                },
            },
            "links": {
                "type": "object",
                "required": ["allToAll", "ring", "network", "messageUs", "copyGBps"],
                "properties": {
                    "allToAll": lines(),
                    "ring": lines(),
                    "network": line("From a GPU's adapter to another node"),
                    "messageUs": above("Microseconds of a sender for each message to a node"),
                    "copyGBps": above("Copies within a GPU's memory, read and written"),
                },
            },
            "expect": { "type": "object", "properties": checks.collect::<serde_json::Map<_, _>>() },
        },
    })
}
