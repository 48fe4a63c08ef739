//! The fleet of `examples/fleet`, for a short while: real calls over real sockets, counted at the provider.
//!
//! Nothing here bounds real time from above: on a busy machine everything takes longer, and the ceiling must still hold.

// The example's own modules; what only its `main`, or only one of the tests, uses is dead here.
#[allow(dead_code, reason = "without the feature `servers` there are no processes")]
#[path = "../examples/fleet/members.rs"]
mod members;
#[allow(dead_code, reason = "the example's main uses it")]
#[path = "../examples/fleet/options.rs"]
mod options;
#[path = "../examples/fleet/provider.rs"]
mod provider;
#[allow(dead_code, reason = "the example's main uses it")]
#[path = "../examples/fleet/run.rs"]
mod run;
#[path = "../examples/fleet/screen.rs"]
mod screen;
#[allow(dead_code, reason = "without the feature `servers` there are none")]
#[path = "../examples/fleet/server.rs"]
mod server;
#[path = "../examples/fleet/worker.rs"]
mod worker;

use members::Launch;
use options::Options;
use provider::Provider;
use run::run;
use screen::Screen;
use std::future::pending;
use tower_herd::store::MemoryStore;

fn options(line: &str) -> Options {
    Options::read(["fleet"].into_iter().chain(line.split_whitespace())).unwrap()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn fleets_of_one_process_share_a_ceiling() {
    let options = options("--seconds 5 --processes 4 --ceiling 5");
    let launch = Launch::Threads(MemoryStore::new());
    let report = run(&options, &launch, None, &Screen::new(4, true), pending()).await.unwrap();
    assert!(report.held() && !report.stopped, "{report:?}");
    assert!(report.counts.peak <= 5 && report.counts.refused == 0, "{report:?}");
    assert!(report.done > 0 && report.failed == 0, "{report:?}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn who_is_stopped_tells_what_there_is() {
    let launch = Launch::Threads(MemoryStore::new());
    let stop = tokio::time::sleep(std::time::Duration::from_secs(1));
    let options = options("--seconds 3600 --processes 2");
    let report = run(&options, &launch, None, &Screen::new(2, true), stop).await.unwrap();
    assert!(report.stopped && report.held(), "{report:?}");
}

/// Real processes, a real Redis, and one of them killed, one stopped beyond its lease, and Redis restarted empty.
#[cfg(all(unix, feature = "servers"))]
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn processes_share_a_ceiling_through_trouble() {
    let options = options("--redis own --chaos --seconds 30 --processes 5 --ceiling 8");
    let server = server::Server::find("own").await.unwrap();
    let program = std::env::current_exe().unwrap();
    let arguments = ["--exact", "a_member", "--ignored", "--nocapture"].map(Into::into).to_vec();
    let launch = Launch::Processes { program, arguments };
    let report = run(&options, &launch, Some(server), &Screen::new(5, true), pending()).await.unwrap();
    assert!(report.held() && !report.stopped, "{report:?}");
    assert!(report.done > 0, "{report:?}");
}

#[test]
#[ignore = "the main of a member of the test above, which starts it"]
fn a_member() {
    assert!(worker::child() == std::process::ExitCode::SUCCESS);
}

// The judge must be able to say no.
#[test]
fn the_provider_counts_what_is_too_much() {
    for (allowance, excess) in [(0, 2), (1, 1), (2, 0)] {
        let provider = Provider::start(2, 2, 1).unwrap();
        let books = provider.books();
        books.allow(allowance);
        let mut flights: Vec<_> = (0..4).map(|call| books.begin(call % 2)).collect();
        let served: Vec<bool> = flights.iter().map(|(_, takes)| takes.is_some()).collect();
        assert_eq!(served, [true, true, false, false]);
        flights.truncate(1);
        let counts = books.read();
        assert_eq!((counts.now, counts.peak, counts.calls, counts.refused), (1, 4, 4, 2));
        assert_eq!((counts.excess, counts.by_worker), (excess, vec![1, 0]));
    }
}

#[test]
fn what_cannot_be_run_is_said_in_one_line() {
    let wrong = |line: &str| {
        let text =
            Options::read(["fleet"].into_iter().chain(line.split_whitespace())).unwrap_err().unwrap_err();
        assert!(!text.contains('\n'), "{text}");
        text
    };
    assert!(wrong("--chaos").contains("--redis own"));
    assert!(wrong("--redis own --chaos --flush").contains("--flush"));
    assert!(wrong("--redis own --flush").contains("--chaos"));
    assert!(wrong("--redis own --chaos --seconds 10").contains("--seconds"));
    assert!(wrong("--redis own --chaos --processes 2").contains("--processes"));
    assert!(wrong("--ceiling 0").contains("--ceiling"));
    assert!(
        matches!(Options::read(["fleet", "--help"]), Err(Ok(text)) if text.contains("--redis own --chaos"))
    );
    assert!(!Options::read(["fleet", "--help"]).unwrap_err().unwrap().contains("--worker"));
}

#[tokio::test]
async fn a_redis_that_is_not_there_is_named() {
    let port = std::net::TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port();
    let error = server::Server::find(&format!("redis://127.0.0.1:{port}/")).await.err().unwrap();
    assert!(error.contains("--redis"), "{error}");
}
