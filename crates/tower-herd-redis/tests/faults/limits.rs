//! What members agree on: the ceiling, pauses, weights, names.

use crate::{
    herd::{Herd, MS, Worker, all, report, until},
    worker::{Command, Load},
};
use std::time::Duration;
use tokio::time::{Instant, sleep};

// BerriAI/litellm#40291, #27736, #16011, #27900, crewAI#2906: processes under one ceiling, and not each under its own.
// mailgun/gubernator#208, #225: and all of them say the same of it after one renewal.
#[tokio::test]
async fn litellm_40291_27736_16011_27900_crewai_2906_gubernator_208_225_four_processes_are_under_one_ceiling()
{
    let mut herd = Herd::new(10).await;
    herd.plan.load.hold = 40;
    let mut workers = herd.start_all(&["a", "b", "c", "d"]);
    herd.full().await;
    let full = Instant::now();
    for worker in &mut workers {
        until("all have joined", async || {
            let status = worker.status().await;
            (status.members, status.ceiling) == (4, 10)
        })
        .await;
    }
    sleep(Duration::from_secs(4)).await;
    herd.holds(10, all);
    for worker in &workers {
        let done = herd.judge.began(full, Instant::now(), |call| worker.owns(call));
        assert!(done > 10, "{done} calls of {}", worker.name);
    }
}

/// Until all members know this ceiling and hold no more.
async fn agree(workers: &mut [Worker], ceiling: u32) {
    until("all agree", async || {
        let mut slots = 0;
        for worker in &mut *workers {
            let status = worker.status().await;
            if status.ceiling != ceiling {
                return false;
            }
            slots += status.slots.max(status.in_flight);
        }
        slots <= ceiling
    })
    .await;
}

// sidekiq/sidekiq#4857: a changed limit does not go back to the old one with a process that still has that. Lowered below
// what is in flight, and raised, while it runs.
#[tokio::test]
async fn sidekiq_4857_an_old_binary_with_the_old_ceiling_joins() {
    let herd = Herd::new(8).await;
    let mut workers = herd.start_all(&["a", "b", "c"]);
    herd.full().await;
    workers[1].ask(Command::Limits { ceiling: 3, generation: 2 }).await;
    agree(&mut workers, 3).await;
    // Nobody who had a slot was cut off, and from here on it is three.
    let lowered = Instant::now();
    workers.push(herd.start("old", |_| {}));
    until("the old one has joined", async || workers[3].status().await.members == 4).await;
    sleep(herd.times.renewal() * 4).await;
    agree(&mut workers, 3).await;
    let raised = Instant::now();
    let most = herd.judge.most(lowered, |call| call.began < raised);
    assert_eq!(most, 3);
    workers[2].ask(Command::Limits { ceiling: 10, generation: 3 }).await;
    herd.filled(raised, 10, all).await;
    sleep(MS(1000)).await;
    assert_eq!(herd.judge.most(raised, all), 10);
    herd.holds(10, all);
}

// A wait that one process was told holds all of them.
#[tokio::test]
async fn a_429_in_one_process_is_honoured_in_all_others() {
    let mut herd = Herd::new(12).await;
    herd.plan.load.hold = 20;
    let mut workers = herd.start_all(&["a", "b", "c", "d"]);
    herd.full().await;
    herd.judge.throttle("a", 4);
    let mut told = None;
    until("one was told", async || {
        told = herd.judge.calls().iter().find_map(|call| call.ended.filter(|_| call.throttled));
        told.is_some()
    })
    .await;
    let told = told.unwrap();
    for worker in &mut workers {
        until("all pause", async || worker.status().await.paused).await;
    }
    let known = Instant::now();
    let end = told + Duration::from_secs(4);
    assert!(known < end, "the machine is too slow for this test: {:?}", known - told);
    sleep(end.saturating_duration_since(Instant::now())).await;
    assert_eq!(herd.judge.began(known + MS(50), end, all), 0);
    // How long it took until the last of them knew: by the wake channel.
    let last = herd.judge.calls().iter().map(|call| call.began).filter(|began| *began < end).max();
    let took = last.unwrap().saturating_duration_since(told);
    report("a 429 is known everywhere", took, MS(50));
    let after = Instant::now();
    for worker in &workers {
        until("calls again", async || herd.judge.began(after, Instant::now(), |call| worker.owns(call)) > 0)
            .await;
    }
    herd.holds(12, all);
}

#[tokio::test]
async fn weights_of_one_to_three_and_a_name_with_braces() {
    let mut herd = Herd::new(8).await;
    herd.plan.provider = "a{b}c {} }{ %7B \u{e9}\r\n\"'".to_owned();
    herd.plan.load = Load { callers: 8, hold: 100 };
    let light = herd.start("light", |_| {});
    let heavy = herd.start("heavy", |plan| plan.weight = 3);
    herd.full().await;
    sleep(herd.times.renewal() * 5).await;
    let from = Instant::now();
    sleep(Duration::from_secs(4)).await;
    let calls = |worker: &Worker| herd.judge.began(from, Instant::now(), |call| worker.owns(call));
    let (light, heavy) = (calls(&light), calls(&heavy));
    eprintln!("{light} calls of weight 1, {heavy} of weight 3");
    assert!(light > 0 && heavy >= 2 * light && heavy <= 4 * light, "{light} to {heavy}");
    herd.holds(8, all);
    let keys = herd.redis.cli(&["KEYS", "*"]);
    assert_eq!(herd.redis.cli(&["DBSIZE"]), "1", "{keys}");
}

// Names are drawn from the system's randomness, so two processes have one only where one is a copy of the other with its
// memory. The nearest that a test comes to it is a fixed seed, which sets the name where leases are kept on the runtime of
// the calls. The one that the store has heard less of takes another name; until then it is given nothing.
#[tokio::test]
async fn of_two_processes_with_one_name_one_takes_another() {
    let herd = Herd::new(6).await;
    let start = |name: &str| herd.start(name, |plan| plan.seed = Some(7));
    let mut first = start("x");
    herd.full().await;
    let mut twins = vec![start("y"), start("z")];
    until("there are three", async || first.status().await.members == 3).await;
    for twin in &mut twins {
        let since = Instant::now();
        herd.filled(since, 1, |call| twin.owns(call)).await;
        until("each knows of three", async || twin.status().await.members == 3).await;
    }
    sleep(herd.times.ttl).await;
    herd.holds(6, all);
}
