//! Seats of engines on made machines, the cards that NCCL is told, and what /proc shows.

use moe_worker::life::binding::{
    Binding, Seat, Thread, addresses, apply, bind, differences, hca_setting,
};
use moejob_protocol::cpus::{cpu_list, cpu_text};
use moe_worker::life::machine::pci::{Address, Distance};
use moe_worker::life::machine::{Gpu, Hca, LinkLayer, Machine, NumaNode, Place, Port};

fn address(text: &str) -> Address {
    Address::parse(text).expect("an address")
}

fn place(text: &str, node: Option<u32>) -> Place {
    let bridges = vec![format!("pci{}", &text[..7])];
    Place { address: address(text), numa_node: node, local_cpus: None, bridges }
}

/// NUMA nodes by their processors, and GPUs `000N:00:00.0` by their nodes.
fn machine(nodes: &[&str], gpus: &[Option<u32>]) -> Machine {
    let node = |(id, list): (usize, &&str)| {
        let cpus = cpu_list(list).expect("a list");
        NumaNode { id: id as u32, allowed: cpus.clone(), cpus }
    };
    let nodes: Vec<NumaNode> = nodes.iter().enumerate().map(node).collect();
    let gpu = |(at, node): (usize, &Option<u32>)| {
        Gpu { place: place(&format!("{:04x}:00:00.0", at + 1), *node) }
    };
    let mut online: Vec<u32> = nodes.iter().flat_map(|node| node.cpus.clone()).collect();
    online.sort_unstable();
    let gpus = gpus.iter().enumerate().map(gpu).collect();
    Machine { online, has_numa: true, nodes, gpus, ..Machine::default() }
}

fn devices(machine: &Machine) -> Vec<Option<Address>> {
    machine.gpus.iter().map(|gpu| Some(gpu.place.address)).collect()
}

/// `0: 0-9 | 0: 10-19; worker 20-23`, and why not.
fn shown(binding: &Binding) -> String {
    let seat = |seat: &Option<Seat>| match seat {
        Some(seat) => format!("{}: {}", seat.node, cpu_text(&seat.cpus)),
        None => "anywhere".to_string(),
    };
    let seats: Vec<String> = binding.engines.iter().map(seat).collect();
    let worker = binding.worker.as_ref().map_or("anywhere".to_string(), |cpus| cpu_text(cpus));
    let why = if binding.why.is_empty() { String::new() } else { format!(" ({})", binding.why) };
    format!("{}; worker {worker}{why}", seats.join(" | "))
}

fn check(machine: &Machine, allowed: &str, devices: &[Option<Address>], threads: usize) -> String {
    let allowed = cpu_list(allowed).expect("a list");
    let binding = bind(machine, &allowed, devices, threads);
    let (mut all, mut seats) = (Vec::new(), Vec::new());
    for seat in binding.engines.iter().flatten() {
        assert!(!seat.cpus.is_empty() && seat.cpus.is_sorted());
        assert!(seat.cpus.iter().all(|cpu| allowed.contains(cpu) && seat.near.contains(cpu)));
        seats.push(seat.cpus.clone());
    }
    all.extend(binding.worker.iter().flatten().copied());
    assert!(seats.iter().flatten().all(|cpu| !all.contains(cpu)), "the worker's are elsewhere");
    shown(&binding)
}

const NDM: [&str; 4] = ["0-23", "24-47", "48-71", "72-95"];
const NDM_GPUS: [Option<u32>; 8] =
    [Some(1), Some(1), Some(0), Some(0), Some(3), Some(3), Some(2), Some(2)];

#[test]
fn engines_sit_beside_their_gpus_and_the_worker_elsewhere() {
    let ndm = machine(&NDM, &NDM_GPUS);
    assert_eq!(
        check(&ndm, "0-95", &devices(&ndm), 8),
        "1: 24-33 | 1: 34-43 | 0: 0-9 | 0: 10-19 | 3: 72-81 | 3: 82-91 | 2: 48-57 | 2: 58-67; \
         worker 20-23,44-47,68-71,92-95"
    );
    // A worker of two of the GPUs leaves the other nodes to its own threads.
    assert_eq!(
        check(&ndm, "0-95", &devices(&ndm)[..2], 8),
        "1: 24-33 | 1: 34-43; worker 0-23,44-95"
    );
    // Engines that want all of the node get it.
    let half = machine(&["0-7", "8-15"], &[Some(0), Some(0), Some(1)]);
    assert_eq!(check(&half, "0-15", &devices(&half), 4), "0: 0-3 | 0: 4-7 | 1: 8-14; worker 15");
    let full = machine(&["0-3", "4-7"], &[Some(0), Some(1)]);
    assert_eq!(check(&full, "0-7", &devices(&full), 4), "0: 0-3 | 1: 4-7; worker anywhere");
}

#[test]
fn no_two_engines_share_a_core() {
    // Processor n + 16 is the second thread of n's core.
    let smt = machine(&["0-7,16-23", "8-15,24-31"], &[Some(0), Some(0), Some(1), Some(1)]);
    assert_eq!(
        check(&smt, "0-31", &devices(&smt), 1),
        "0: 0-2,16-18 | 0: 3-5,19-21 | 1: 8-10,24-26 | 1: 11-13,27-29; \
         worker 6-7,14-15,22-23,30-31"
    );
}

#[test]
fn a_cpuset_is_honoured() {
    let ndm = machine(&NDM, &NDM_GPUS);
    assert_eq!(
        check(&ndm, "20-40", &devices(&ndm)[..4], 1),
        "1: 24-30 | 1: 31-37 | 0: 20-21 | 0: 22-23; worker 38-40"
    );
    assert_eq!(
        check(&ndm, "0-30", &devices(&ndm)[4..], 1),
        "anywhere | anywhere | anywhere | anywhere; worker anywhere (engine 0 is not bound: no \
         processor of NUMA node 3, where GPU 0005:00:00.0 is, may be used; engine 1 is not bound: \
         no processor of NUMA node 3, where GPU 0006:00:00.0 is, may be used; engine 2 is not \
         bound: no processor of NUMA node 2, where GPU 0007:00:00.0 is, may be used; engine 3 is \
         not bound: no processor of NUMA node 2, where GPU 0008:00:00.0 is, may be used)"
    );
    // Fewer processors than engines: they share.
    assert_eq!(
        check(&ndm, "23-24", &devices(&ndm)[..4], 1),
        "1: 24 | 1: 24 | 0: 23 | 0: 23; worker anywhere (2 engines share processors 23 of node 0; \
         2 engines share processors 24 of node 1)"
    );
}

#[test]
fn where_all_memory_is_equally_near_nobody_is_bound() {
    let one = machine(&["0-7"], &[Some(0)]);
    assert_eq!(
        check(&one, "0-7", &devices(&one), 1),
        "anywhere; worker anywhere (all processors that may be used are of one NUMA node)"
    );
    let two = machine(&["0-3", "4-7"], &[Some(0), None]);
    assert_eq!(
        check(&two, "0-3", &[None, None], 1),
        "anywhere | anywhere; worker anywhere (all processors that may be used are of one NUMA \
         node)"
    );
    let none = Machine { has_numa: false, ..two.clone() };
    assert_eq!(
        check(&none, "0-7", &[None], 1),
        "anywhere; worker anywhere (the kernel lists no NUMA nodes)"
    );
    assert_eq!(
        check(&two, "0-7", &devices(&two), 1),
        "0: 0-3 | anywhere; worker anywhere (engine 1 is not bound: the NUMA node of GPU \
         0002:00:00.0 is not known)"
    );
    let strange = [Some(address("0009:00:00.0"))];
    assert_eq!(
        check(&two, "0-7", &strange, 1),
        "anywhere; worker anywhere (engine 0 is not bound: GPU 0009:00:00.0 is not below /sys)"
    );
    assert_eq!(check(&two, "0-7", &[], 1), "; worker 0-7");
}

#[test]
fn engines_without_gpus_spread_over_the_nodes() {
    let two = machine(&["0-3", "4-7"], &[]);
    assert_eq!(check(&two, "0-7", &[None; 2], 1), "0: 0-3 | 1: 4-7; worker anywhere");
    assert_eq!(
        check(&two, "0-7", &[None; 4], 1),
        "0: 0-1 | 0: 2-3 | 1: 4-5 | 1: 6-7; worker anywhere"
    );
    assert_eq!(check(&two, "0-7", &[None], 1), "0: 0-3; worker 4-7");
}

#[test]
fn gpus_are_known_by_their_numbers_where_that_is_plain() {
    let ndm = machine(&NDM, &NDM_GPUS);
    let all: Vec<Address> = ndm.gpus.iter().map(|gpu| gpu.place.address).collect();
    assert_eq!(addresses(&ndm.gpus, 8, None), Some(all.clone()));
    assert_eq!(addresses(&ndm.gpus, 8, Some("2, 0")), Some(vec![all[2], all[0]]));
    assert_eq!(addresses(&ndm.gpus, 2, None), None, "a container that was given two of them");
    for list in ["GPU-77", "8", "0,,1", ""] {
        assert_eq!(addresses(&ndm.gpus, 8, Some(list)), None, "{list:?}");
    }
}

fn hca(name: &str, at: &str, ports: &[(LinkLayer, &str)], distances: &[Distance]) -> Hca {
    let port = |(at, (link_layer, state)): (usize, &(LinkLayer, &str))| Port {
        number: at as u32 + 1,
        link_layer: *link_layer,
        state: state.to_string(),
        rate: Some(200.0),
    };
    let ports = ports.iter().enumerate().map(port).collect();
    let (name, distances) = (name.to_string(), distances.to_vec());
    Hca { name, place: place(at, Some(0)), ports, distances }
}

#[test]
fn cards_are_named_exactly() {
    use LinkLayer::{Ethernet, InfiniBand};
    let mut two = machine(&["0-3", "4-7"], &[Some(0), Some(1)]);
    let (near, far) = ([Distance::Node, Distance::System], [Distance::System, Distance::Node]);
    two.hcas = vec![
        hca("mlx5_0", "0101:00:00.0", &[(InfiniBand, "ACTIVE")], &near),
        hca("mlx5_1", "0102:00:00.0", &[(InfiniBand, "DOWN"), (InfiniBand, "ACTIVE")], &far),
        hca("mlx5_2", "0103:00:00.0", &[(InfiniBand, "INIT")], &near),
        hca("mlx5_8", "0110:00:02.0", &[(Ethernet, "ACTIVE")], &near),
    ];
    let all = Some("=mlx5_0:1,mlx5_1:2".to_string());
    assert_eq!(hca_setting(&two, &[], &[]), all);
    let gpus: Vec<Address> = two.gpus.iter().map(|gpu| gpu.place.address).collect();
    assert_eq!(hca_setting(&two, &gpus, &[]), all);
    assert_eq!(hca_setting(&two, &gpus[..1], &[]), Some("=mlx5_0:1".to_string()));
    let listed = [address("0102:00:00.0"), address("0103:00:00.0")];
    assert_eq!(hca_setting(&two, &gpus, &listed), Some("=mlx5_1:2".to_string()));
    let far = Some("=mlx5_1:2".to_string());
    assert_eq!(hca_setting(&two, &gpus[..1], &listed), far, "a far one is better than TCP");
    assert_eq!(hca_setting(&two, &gpus, &listed[1..]), None);
}

#[test]
fn threads_that_may_run_elsewhere_are_named() {
    let seat = Seat { node: 0, cpus: vec![0, 1], near: vec![0, 1, 2, 3] };
    let thread = |id, name: &str, allowed: &[u32]| {
        Thread { id, name: name.to_string(), allowed: allowed.to_vec() }
    };
    let good = [thread(7, "moejob", &[0, 1]), thread(8, "nccl", &[0, 1, 2, 3])];
    assert_eq!(differences(&seat, 7, &good), [""; 0]);
    let wrong = [thread(7, "moejob", &[0, 1, 2]), thread(8, "feeder", &[3, 4])];
    assert_eq!(
        differences(&seat, 7, &wrong),
        [
            "thread 7 (moejob) may use 0-2, planned 0-1",
            "thread 8 (feeder) may use 3-4, planned 0-3"
        ]
    );
    assert_eq!(differences(&seat, 7, &good[1..]).len(), 1);
}

#[test]
fn a_small_limit_of_locked_memory_is_told() {
    assert_eq!(apply::too_little_lockable(None), None);
    assert_eq!(apply::too_little_lockable(Some(1 << 40)), None);
    let told = apply::too_little_lockable(Some(8 << 20)).expect("told");
    assert!(told.contains("8192 KiB") && told.contains("LimitMEMLOCK=infinity"), "{told}");
}

#[test]
fn this_process_shows_its_threads() {
    let threads = apply::threads(std::process::id()).expect("our own");
    assert!(threads.iter().any(|thread| thread.id == std::process::id()), "{threads:?}");
    assert!(threads.iter().all(|thread| !thread.allowed.is_empty()), "{threads:?}");
    assert!(apply::threads(u32::MAX).is_err());
}
