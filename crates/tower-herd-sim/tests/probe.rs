//! The contract probe passes layers that are right and catches each of those that are wrong.

use std::future::{Ready, ready};
use std::time::Duration;

use bytes::Bytes;
use http::{Request, Response};
use http_body_util::Full;
use tower::layer::util::Identity;
use tower::limit::ConcurrencyLimitLayer;
use tower::load_shed::LoadShedLayer;
use tower::retry::{Policy, RetryLayer};
use tower::timeout::TimeoutLayer;
use tower_herd_sim::probe::{Contract, ProbeBody, ProbeError, UnderTest, Wrong, WrongLayer};

#[tokio::test(start_paused = true)]
async fn layers_that_are_right_pass() {
    Contract::new(|| UnderTest::new(Identity::new())).check_http().await.assert_kept();
    Contract::new(|| UnderTest::new(Identity::new())).check_plain().await.assert_kept();
    Contract::new(|| UnderTest::new(ConcurrencyLimitLayer::new(1))).check_http().await.assert_kept();
    Contract::new(|| UnderTest::new(LoadShedLayer::new())).check_http().await.assert_kept();
    let timeout = || UnderTest::new(TimeoutLayer::new(Duration::from_millis(5)));
    Contract::new(timeout).check_plain().await.assert_kept();
}

#[derive(Clone)]
struct Twice(u32);

type Reply = Result<Response<ProbeBody>, ProbeError>;

impl Policy<Request<Full<Bytes>>, Response<ProbeBody>, ProbeError> for Twice {
    type Future = Ready<()>;

    fn retry(&mut self, _: &mut Request<Full<Bytes>>, result: &mut Reply) -> Option<Ready<()>> {
        let bad = !matches!(result, Ok(r) if r.status().is_success());
        (bad && self.0 > 0).then(|| {
            self.0 -= 1;
            ready(())
        })
    }

    fn clone_request(&mut self, request: &Request<Full<Bytes>>) -> Option<Request<Full<Bytes>>> {
        Some(request.clone())
    }
}

#[tokio::test(start_paused = true)]
async fn a_retry_layer_that_readies_again_passes() {
    let report = Contract::new(|| UnderTest::new(RetryLayer::new(Twice(2)))).check_http().await;
    report.assert_kept();
    assert!(report.trials > 100, "{}", report.trials);
}

#[tokio::test(start_paused = true)]
async fn every_wrong_layer_is_caught_for_what_it_does() {
    for (wrong, check, what) in [
        (Wrong::CallsClone, "readiness", "clone of a ready service that was not made ready"),
        (Wrong::ReusesReadiness, "readiness", "called twice on one readiness"),
        (Wrong::LeaksOnDrop, "drop", "did not come back after its future was dropped at pending poll"),
        (Wrong::LeaksOnError, "readiness", "did not come back after calls in sequence"),
        (Wrong::LeaksReadiness, "drop-ready", "after ready services were dropped uncalled"),
        (Wrong::Spins, "readiness", "never became ready"),
        (Wrong::HidesReadyError, "ready-error", "swallowed"),
        (Wrong::PollsAfterEnd, "readiness", "polled a future after its end"),
        (Wrong::Detaches, "drop", "inner future(s) still alive"),
    ] {
        let make = || {
            let layer = WrongLayer::new(wrong);
            let asked = layer.clone();
            UnderTest::new(layer).quiescent(move || asked.quiescent())
        };
        for (kind, report) in [
            ("http", Contract::new(make).max_polls(8).check_http().await),
            ("plain", Contract::new(make).max_polls(8).check_plain().await),
        ] {
            let hit = report.findings.iter().any(|f| f.check == check && f.what.contains(what));
            assert!(hit, "{wrong:?} ({kind}): {:#?}", report.findings);
        }
    }
    assert_eq!(Wrong::ALL.len(), 9);
}

#[tokio::test(start_paused = true)]
#[should_panic(expected = "contract is broken")]
async fn a_broken_contract_panics_with_its_findings() {
    let make = || UnderTest::new(WrongLayer::new(Wrong::CallsClone));
    Contract::new(make).check_http().await.assert_kept();
}
