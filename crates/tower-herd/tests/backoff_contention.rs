//! The published model of optimistic writers that contend (AWS Architecture Blog, 2015), with our back-off:
//! each reads a version, writes it back, and if another was faster, waits and begins anew.
#![cfg(feature = "jittered-retry")]

use std::{cmp::Reverse, collections::BinaryHeap, time::Duration};
use tower_herd::{Backoff, random::Seeds};

const BASE: Duration = Duration::from_millis(5);
const CAP: Duration = Duration::from_millis(2000);

#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum Event {
    Read,
    Write { version: u64 },
}

/// About normal, with mean 10 ms and deviation 2 ms.
fn network(random: &mut tower_herd::random::Random) -> u64 {
    let normal = (0..12).map(|_| random.unit()).sum::<f64>() - 6.0;
    ((10.0 + 2.0 * normal).abs() * 1e6) as u64
}

/// Milliseconds until all have written, and the writes it took.
fn contend(kind: Option<Backoff>, clients: usize, seed: u64) -> (f64, u64) {
    let mut random = Seeds::from_seed(seed).session();
    let (mut version, mut writes, mut done, mut last) = (0u64, 0u64, 0, 0u64);
    let mut state = vec![(0u32, BASE); clients];
    let mut events: BinaryHeap<Reverse<(u64, usize, Event)>> =
        (0..clients).map(|client| Reverse((network(&mut random), client, Event::Read))).collect();
    while let Some(Reverse((now, client, event))) = events.pop() {
        match event {
            Event::Read => {
                let there = now + network(&mut random) + network(&mut random);
                events.push(Reverse((there, client, Event::Write { version })));
            }
            Event::Write { version: read } => {
                writes += 1;
                let back = now + network(&mut random);
                if read == version {
                    version += 1;
                    done += 1;
                    last = back;
                    continue;
                }
                let (attempt, previous) = &mut state[client];
                // The model counts from one.
                *attempt += 1;
                let wait = match kind {
                    None => Duration::ZERO,
                    Some(kind) => {
                        let range = kind.range(BASE, CAP, *attempt, *previous);
                        range.draw(Duration::MAX, &mut random).unwrap()
                    }
                };
                *previous = wait;
                let again = back + wait.as_nanos() as u64 + network(&mut random);
                events.push(Reverse((again, client, Event::Read)));
            }
        }
    }
    assert_eq!(done, clients);
    (last as f64 / 1e6, writes)
}

#[test]
fn as_published_for_a_hundred_writers() {
    let vectors: serde_json::Value = serde_json::from_str(include_str!("vectors/backoff.json")).unwrap();
    let table = vectors["occ_contention"]["n100"].as_object().unwrap();
    for (name, expected) in table {
        let kind = match name.as_str() {
            "none" => None,
            "full" => Some(Backoff::Full),
            "equal" => Some(Backoff::Equal),
            "decorrelated" => Some(Backoff::Decorrelated),
            // Ours never waits without jitter.
            "exponential" => continue,
            other => panic!("unknown kind {other}"),
        };
        let runs = 40;
        let (mut time, mut writes) = (0.0, 0);
        for seed in 0..runs {
            let (took, sent) = contend(kind, 100, seed);
            time += took / runs as f64;
            writes += sent;
        }
        let writes = writes as f64 / runs as f64;
        eprintln!("{name}: {time} ms, {writes} writes; published {expected}");
        let near = |got: f64, index: usize| {
            let published = expected[index].as_f64().unwrap();
            (published * 0.94..=published * 1.06).contains(&got)
        };
        assert!(near(time, 0) && near(writes, 1), "{name}: {time} ms, {writes} writes; published {expected}");
    }
}
