//! The stampede of `examples/stampede`, scaled down: real servers, real sockets, the real stack.
//!
//! Nothing here bounds real time from above: on a busy machine everything takes longer, and all that is
//! promised must still hold.

// The example's own modules; what only its `main` uses is dead here.
#[path = "../examples/stampede/crossing.rs"]
mod crossing;
#[allow(dead_code, reason = "the example's main uses it")]
#[path = "../examples/stampede/drive.rs"]
mod drive;
#[allow(dead_code, reason = "the example's main uses it")]
#[path = "../examples/stampede/options.rs"]
mod options;
#[path = "../examples/stampede/policies.rs"]
mod policies;
#[path = "../examples/stampede/providers.rs"]
mod providers;
#[allow(dead_code, reason = "the example's main uses it")]
#[path = "../examples/stampede/wire.rs"]
mod wire;

use std::{
    future::pending,
    net::TcpListener,
    sync::{Arc, atomic::Ordering},
    time::Duration,
};

use drive::{Field, Finished, Live, Policy, drive};
use options::{Options, Target, check_open_files, check_reachable};
use providers::Providers;
use tower_herd_sim::{
    provider::{CallRecord, Outcome},
    scenario::Settings,
};

/// A fifth of the scenario's latency: the cut comes after one second.
fn settings() -> Settings {
    Settings { tasks: 1200, ..options::scaled(Duration::from_millis(200)) }
}

async fn run(settings: &Settings, policy: Policy, field: &Field<'_>) -> Finished {
    drive(settings, 1, policy, field, |_| {}, pending()).await.unwrap()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_stack_loses_nothing_where_the_naive_chain_floods() {
    let settings = settings();
    let ours = Providers::start(&settings, 1, None).unwrap();
    let naive = run(&settings, Policy::Naive, &Field::Ours(&ours)).await.row;
    let herd = run(&settings, Policy::TowerHerd, &Field::Ours(&ours)).await.row;

    assert_eq!((herd.done, herd.lost), (1200, 0));
    assert!(herd.amplification.unwrap() <= 1.05, "{herd:?}");
    assert!(herd.throttled.unwrap() > 0, "the cut was never met: {herd:?}");
    assert_eq!((herd.early_calls, herd.duplicates), (Some(0), Some(0)), "{herd:?}");
    // How hard the naive chain hits depends on how fast this machine lets it.
    assert!(naive.throttled.unwrap() > 5 * herd.throttled.unwrap(), "{naive:?}");
    assert!(naive.early_calls.unwrap() > 0, "{naive:?}");

    let json: serde_json::Value = serde_json::from_str(&herd.json()).unwrap();
    let keys: Vec<&str> = json.as_object().unwrap().keys().map(String::as_str).collect();
    let mut expected = [
        "scenario",
        "policy",
        "tasks",
        "done",
        "lost",
        "wire_calls",
        "amplification",
        "called",
        "throttled",
        "seconds",
        "oracle_seconds",
        "early_calls",
        "duplicates",
        "alerts",
        "peak_100ms",
        "in_flight_peak",
        "longest_wait",
        "oracle_longest_wait",
        "trips",
    ];
    expected.sort_unstable();
    assert_eq!(keys, expected);
    for by_rung in ["peak_100ms", "in_flight_peak"] {
        assert!(["1", "2", "3"].iter().all(|rung| json[by_rung][rung].as_u64() > Some(0)), "{json}");
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn of_servers_that_are_not_ours_only_our_side_is_known() {
    let settings = Settings { tasks: 60, agents: 10, ..settings() };
    let ours = Providers::start(&settings, 1, None).unwrap();
    let theirs: Vec<Target> = ours.targets(&settings);
    check_reachable(&theirs).unwrap();
    let blind = Settings { ceilings: Vec::new(), cut_at: None, ..settings.clone() };
    let row = run(&blind, Policy::TowerHerd, &Field::Theirs(&theirs)).await.row;
    assert_eq!((row.done, row.wire_calls, row.throttled), (60, Some(60), Some(0)));
    let unknown = (row.early_calls, row.duplicates, row.peak_100ms, row.in_flight_peak, row.oracle_seconds);
    assert_eq!(unknown, (None, None, None, None, None));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_run_that_is_stopped_tells_what_there_is() {
    let settings = settings();
    let ours = Providers::start(&settings, 1, None).unwrap();
    let (tell, told) = tokio::sync::oneshot::channel::<Arc<Live>>();
    let stop = async {
        let live = told.await.unwrap();
        while live.done.load(Ordering::Relaxed) < 100 {
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
    };
    let watch = |live| drop(tell.send(live));
    let stopped = drive(&settings, 1, Policy::TowerHerd, &Field::Ours(&ours), watch, stop).await.unwrap();
    assert!(stopped.stopped);
    assert_eq!((stopped.row.lost, stopped.row.tasks), (0, stopped.row.done));
    assert!(stopped.row.done >= 100 && stopped.row.done < 1200, "{:?}", stopped.row);
}

#[test]
fn what_cannot_be_run_is_said_in_one_line() {
    let wrong = |line: &str| {
        let words = ["stampede"].into_iter().chain(line.split_whitespace());
        let text = Options::read(words).unwrap_err().unwrap_err();
        assert!(!text.contains('\n'), "{text}");
        text
    };
    assert!(wrong("--agents 0").contains("--agents"));
    assert!(wrong("--colour red").contains("--colour"));
    assert!(wrong("--policy best").contains("tower-herd"));
    assert!(wrong("--provider https://example.com").contains("http://"));
    assert!(wrong("--provider nonsense").contains("http://"));
    assert!(wrong("--provider http://localhost:1,none").contains("ceiling"));
    assert!(wrong("--provider http://localhost:1,0").contains("ceiling"));
    assert!(wrong("--virtual --provider http://localhost:1").contains("--provider"));
    assert!(wrong("--listen 80000").contains("--listen"));
    assert!(matches!(Options::read(["stampede", "--help"]), Err(Ok(text)) if text.contains("--virtual")));

    let known: Target = "http://[::1]:8080/v1,20".parse().unwrap();
    assert_eq!((known.url.host(), known.ceiling), (Some("[::1]"), Some(20)));
    let too_many = check_open_files(u32::MAX, 3, 2);
    assert!(!cfg!(target_os = "linux") || too_many.unwrap_err().contains("ulimit"));
}

#[test]
fn a_server_that_is_not_there_and_a_port_in_use_are_named() {
    let taken = TcpListener::bind("127.0.0.1:0").unwrap();
    let port = taken.local_addr().unwrap().port();
    let error = Providers::start(&settings(), 1, Some(port)).err().unwrap();
    assert!(error.contains(&port.to_string()) && error.contains("--listen"), "{error}");
    drop(taken);
    let gone: Target = format!("http://127.0.0.1:{port}/").parse().unwrap();
    let error = check_reachable(&[gone]).unwrap_err();
    assert!(error.contains(&port.to_string()) && error.contains("refuses connections"), "{error}");
}

#[test]
fn a_call_that_crossed_the_refusal_is_not_early_and_one_that_left_after_it_is() {
    let ms = Duration::from_millis;
    let call = |task, left, ended, outcome| CallRecord {
        arrival: ms(left),
        task: Some(task),
        process: 0,
        outcome,
        ended: Some(ms(ended)),
        early: false,
        probe: false,
    };
    // Refused, and the refusal read at 100; the provider had sent it at 60.
    let refused = call(1, 50, 100, Outcome::Throttled);
    let sent = [
        refused,
        call(2, 99, 500, Outcome::Served),
        call(3, 130, 500, Outcome::Served),
        call(1, 1101, 1500, Outcome::Served),
    ];
    let mut records = sent;
    records.iter_mut().skip(1).for_each(|r| r.early = true);
    crossing::forgive(&mut records, &sent, Duration::from_secs(1));
    assert_eq!(records.map(|r| r.early), [false, false, true, false]);
}
