//! The callers that put a layer to the test.

use std::fmt;
use std::future::{Future, poll_fn};
use std::pin::{Pin, pin};
use std::task::Poll;
use std::time::Duration;

use bytes::Bytes;
use http::{Request, Response};
use http_body::Body;
use http_body_util::{BodyExt, Full};
use tokio::time::{Instant, timeout};
use tower::{Service, ServiceExt};
use tower_layer::Layer;

use super::service::{ProbeOutcome, ProbeScript, ProbeService, Violation};
use crate::BoxError;

/// A layer with the means to see whether it holds anything.
#[must_use = "nothing is tested until a contract is checked"]
pub struct UnderTest<L> {
    layer: L,
    quiescent: Box<dyn Fn() -> bool>,
}

impl<L: fmt::Debug> fmt::Debug for UnderTest<L> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("UnderTest").field("layer", &self.layer).finish_non_exhaustive()
    }
}

impl<L> UnderTest<L> {
    /// A layer.
    pub fn new(layer: L) -> Self {
        Self { layer, quiescent: Box::new(|| true) }
    }

    /// Says whether everything the layer hands out (permits, slots, probes) is back.
    pub fn quiescent(mut self, quiescent: impl Fn() -> bool + 'static) -> Self {
        self.quiescent = Box::new(quiescent);
        self
    }
}

/// A reply the probe can read to its end, or leave half read.
pub trait Reply {
    /// Reads `frames` pieces of it, or all.
    fn read(self, frames: Option<usize>) -> impl Future<Output = ()>;
}

impl<B: Body> Reply for Response<B> {
    async fn read(self, frames: Option<usize>) {
        let mut body = pin!(self.into_body());
        let mut left = frames.unwrap_or(usize::MAX);
        while left > 0 && matches!(body.frame().await, Some(Ok(_))) {
            left -= 1;
        }
    }
}

impl Reply for u64 {
    async fn read(self, _: Option<usize>) {}
}

/// One breach of the contract and the circumstances.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Finding {
    /// Which check.
    pub check: &'static str,
    /// Which behaviour of the inner service.
    pub script: &'static str,
    /// What happened.
    pub what: String,
}

impl fmt::Display for Finding {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "[{} / {}] {}", self.check, self.script, self.what)
    }
}

/// What the probe found.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Report {
    /// Services that were put to the test.
    pub trials: usize,
    /// Breaches, each once for a check and a script.
    pub findings: Vec<Finding>,
}

impl Report {
    /// Whether nothing was found.
    pub fn kept(&self) -> bool {
        self.findings.is_empty()
    }

    /// Checks that nothing was found.
    ///
    /// # Panics
    /// With all findings, if there are any.
    #[track_caller]
    pub fn assert_kept(&self) {
        assert!(self.kept(), "{self}");
    }

    fn add(&mut self, check: &'static str, script: &'static str, what: String) {
        let finding = Finding { check, script, what };
        if !self.findings.contains(&finding) {
            self.findings.push(finding);
        }
    }
}

impl fmt::Display for Report {
    /// One line a finding.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.kept() {
            return write!(f, "the Service contract is kept ({} trials)", self.trials);
        }
        f.write_str("the Service contract is broken:")?;
        self.findings.iter().try_for_each(|finding| write!(f, "\n{finding}"))
    }
}

/// The probe, for layers made by a factory: each trial gets a fresh one.
#[derive(Clone, Debug)]
#[must_use = "nothing is tested until the contract is checked"]
pub struct Contract<F> {
    make: F,
    settle: Duration,
    limit: Duration,
    max_polls: usize,
    scripts: Vec<(&'static str, ProbeScript)>,
}

impl<F> Contract<F> {
    /// A probe with the standard scripts.
    pub fn new(make: F) -> Self {
        Self {
            make,
            settle: Duration::from_secs(30),
            limit: Duration::from_secs(300),
            max_polls: 64,
            scripts: standard_scripts(),
        }
    }

    /// How long to wait until what was dropped has come back. Default 30 s, on tokio's clock.
    pub fn settle(mut self, time: Duration) -> Self {
        self.settle = time;
        self
    }

    /// How long a call may take before it counts as stuck. Default 300 s, on tokio's clock.
    pub fn limit(mut self, time: Duration) -> Self {
        self.limit = time;
        self
    }

    /// After how many pending polls a future is dropped at the latest. Default 64.
    pub fn max_polls(mut self, polls: usize) -> Self {
        self.max_polls = polls;
        self
    }

    /// Adds a behaviour of the inner service to the standard ones.
    pub fn script(mut self, name: &'static str, script: ProbeScript) -> Self {
        self.scripts.push((name, script));
        self
    }

    /// Probes with `http::Request<Full<Bytes>>`.
    pub async fn check_http<L, B>(self) -> Report
    where
        F: Fn() -> UnderTest<L>,
        L: Layer<ProbeService>,
        L::Service: Service<Request<Full<Bytes>>, Response = Response<B>> + Clone,
        <L::Service as Service<Request<Full<Bytes>>>>::Error: Into<BoxError>,
        B: Body,
    {
        self.check(|| {
            let mut request = Request::new(Full::new(Bytes::from_static(b"{\"probe\":true}")));
            *request.uri_mut() = http::Uri::from_static("http://rung-1/probe");
            request
        })
        .await
    }

    /// Probes with `u64` requests and replies.
    pub async fn check_plain<L>(self) -> Report
    where
        F: Fn() -> UnderTest<L>,
        L: Layer<ProbeService>,
        L::Service: Service<u64, Response = u64> + Clone,
        <L::Service as Service<u64>>::Error: Into<BoxError>,
    {
        self.check(|| 7u64).await
    }

    /// Probes with requests of the caller's making.
    pub async fn check<L, R>(self, request: impl Fn() -> R) -> Report
    where
        F: Fn() -> UnderTest<L>,
        L: Layer<ProbeService>,
        L::Service: Service<R> + Clone,
        <L::Service as Service<R>>::Response: Reply,
        <L::Service as Service<R>>::Error: Into<BoxError>,
    {
        let mut report = Report::default();
        for (name, script) in &self.scripts {
            let mut run = Runner { contract: &self, name, script, request: &request, report: &mut report };
            run.readiness().await;
            run.drops().await;
            run.drop_ready().await;
        }
        let failing = ProbeScript { ready_fails: true, ..ProbeScript::default() };
        Runner {
            contract: &self,
            name: "not ready",
            script: &failing,
            request: &request,
            report: &mut report,
        }
        .ready_error()
        .await;
        report
    }
}

fn standard_scripts() -> Vec<(&'static str, ProbeScript)> {
    use ProbeOutcome::{Error, Good, Refused, Status};
    let slow = ProbeScript { pending: 2, delay: Duration::from_millis(10), ..ProbeScript::default() };
    let then_good = |first| ProbeScript { outcomes: vec![first, Good], ..slow.clone() };
    vec![
        ("smooth", ProbeScript::default()),
        ("slow", slow.clone()),
        ("slow body", ProbeScript { body_delay: Duration::from_millis(10), ..slow.clone() }),
        ("throttled once", then_good(Status(429, Some(1)))),
        ("failing once", then_good(Status(500, None))),
        ("error once", then_good(Error)),
        ("refused once", then_good(Refused)),
        ("errors only", ProbeScript { outcomes: vec![Error], ..slow }),
    ]
}

/// Neither ready nor ever going to be: the time is up, or it only wakes itself.
struct Endless;

/// Awaits a future for so long, and for so many polls without any time passing: under a paused
/// clock a future that wakes itself for ever would stop time, and with it the timeout.
async fn bounded<T>(limit: Duration, future: impl Future<Output = T>) -> Result<T, Endless> {
    const SPINS: u32 = 10_000;
    let mut future = pin!(future);
    let (mut at, mut spins) = (Instant::now(), 0);
    let watched = poll_fn(|cx| {
        let now = Instant::now();
        if now > at {
            (at, spins) = (now, 0);
        }
        spins += 1;
        if spins > SPINS {
            return Poll::Ready(Err(Endless));
        }
        future.as_mut().poll(cx).map(Ok)
    });
    timeout(limit, watched).await.unwrap_or(Err(Endless))
}

/// How far a future came.
enum Step<T> {
    Done(T),
    Dropped,
    Stuck,
}

struct Runner<'a, F, Q> {
    contract: &'a Contract<F>,
    name: &'static str,
    script: &'a ProbeScript,
    request: &'a Q,
    report: &'a mut Report,
}

/// One layer over one probe.
struct Trial<L, S> {
    under: UnderTest<L>,
    probe: ProbeService,
    service: S,
}

impl<F, Q, L, R> Runner<'_, F, Q>
where
    F: Fn() -> UnderTest<L>,
    L: Layer<ProbeService>,
    L::Service: Service<R> + Clone,
    <L::Service as Service<R>>::Response: Reply,
    <L::Service as Service<R>>::Error: Into<BoxError>,
    Q: Fn() -> R,
{
    fn trial(&mut self) -> Trial<L, L::Service> {
        let under = (self.contract.make)();
        let probe = ProbeService::new(self.script.clone());
        // A clone: the probe's own instance stays outside to be asked.
        let service = under.layer.layer(probe.clone());
        self.report.trials += 1;
        Trial { under, probe, service }
    }

    fn found(&mut self, check: &'static str, what: impl Into<String>) {
        self.report.add(check, self.name, what.into());
    }

    /// Polls a future until it is done, or has been pending `pendings` + 1 times.
    async fn step<T>(&self, future: &mut Pin<Box<impl Future<Output = T>>>, pendings: usize) -> Step<T> {
        let mut seen = 0;
        let polled = poll_fn(|cx| match future.as_mut().poll(cx) {
            Poll::Ready(out) => Poll::Ready(Step::Done(out)),
            Poll::Pending if seen == pendings => Poll::Ready(Step::Dropped),
            Poll::Pending => {
                seen += 1;
                Poll::Pending
            }
        });
        bounded(self.contract.limit, polled).await.unwrap_or(Step::Stuck)
    }

    /// One whole call on a clone; what comes of it does not matter, that something does.
    async fn whole(&mut self, check: &'static str, service: &L::Service, when: &str) {
        let call = service.clone().oneshot((self.request)());
        match bounded(self.contract.limit, call).await {
            Ok(Ok(reply)) => {
                if bounded(self.contract.limit, reply.read(None)).await.is_err() {
                    self.found(check, format!("a body never ended {when}"));
                }
            }
            Ok(Err(_)) => {}
            Err(_) => self.found(check, format!("a call never ended {when}")),
        }
    }

    /// Waits until nothing is held any more, then reports what the probe saw.
    async fn close<S>(&mut self, check: &'static str, trial: &Trial<L, S>, when: &str) {
        let step = self.contract.settle / 64;
        for _ in 0..=64 {
            let held = trial.probe.live_futures() + trial.probe.live_bodies();
            if held == 0 && (trial.under.quiescent)() {
                break;
            }
            tokio::time::sleep(step).await;
        }
        match trial.probe.live_futures() {
            0 => {}
            n => self.found(check, format!("{n} inner future(s) still alive {when}")),
        }
        match trial.probe.live_bodies() {
            0 => {}
            n => self.found(check, format!("{n} reply bod(ies) still alive {when}")),
        }
        if !(trial.under.quiescent)() {
            self.found(check, format!("something it hands out did not come back {when}"));
        }
        self.violations(check, &trial.probe);
    }

    fn violations(&mut self, check: &'static str, probe: &ProbeService) {
        for violation in probe.violations() {
            let violation: Violation = violation;
            self.found(check, violation.to_string());
        }
    }

    async fn readiness(&mut self) {
        const CHECK: &str = "readiness";
        // One after the other on one instance, ready twice before each call.
        let mut trial = self.trial();
        for _ in 0..3 {
            if !self.ready(CHECK, &mut trial.service).await || !self.ready(CHECK, &mut trial.service).await {
                break;
            }
            let call = trial.service.call((self.request)());
            self.end(CHECK, call, "in sequence").await;
        }
        self.close(CHECK, &trial, "after calls in sequence").await;

        // A service that was cloned while it was ready, then the clone.
        let mut trial = self.trial();
        if self.ready(CHECK, &mut trial.service).await {
            let clone = trial.service.clone();
            // In this order, since readiness may hold what the clone needs.
            let call = trial.service.call((self.request)());
            self.end(CHECK, call, "on a service that was cloned while ready").await;
            self.whole(CHECK, &clone, "on a clone of a ready service").await;
        }
        self.close(CHECK, &trial, "after a call on a clone").await;

        // The service goes before its future does.
        let mut trial = self.trial();
        if self.ready(CHECK, &mut trial.service).await {
            let call = trial.service.call((self.request)());
            let trial = Trial { under: trial.under, probe: trial.probe, service: drop(trial.service) };
            self.end(CHECK, call, "after its service was dropped").await;
            self.close(CHECK, &trial, "after the service was dropped").await;
        }

        // Eight at once.
        let trial = self.trial();
        let calls: Vec<_> = (0..8).map(|_| trial.service.clone().oneshot((self.request)())).collect();
        let all = futures_util::future::join_all(calls.into_iter().map(|call| async {
            if let Ok(reply) = call.await {
                reply.read(None).await;
            }
        }));
        if bounded(self.contract.limit, all).await.is_err() {
            self.found(CHECK, "eight calls at once never ended");
        }
        self.close(CHECK, &trial, "after eight calls at once").await;
    }

    /// Waits until the service is ready.
    async fn ready(&mut self, check: &'static str, service: &mut L::Service) -> bool {
        match bounded(self.contract.limit, service.ready()).await {
            Ok(Ok(_)) => true,
            Ok(Err(_)) => false,
            Err(_) => {
                self.found(check, "never became ready");
                false
            }
        }
    }

    /// Awaits a call and reads its reply.
    async fn end(&mut self, check: &'static str, call: <L::Service as Service<R>>::Future, when: &str) {
        let whole = async {
            if let Ok(reply) = call.await {
                reply.read(None).await;
            }
        };
        if bounded(self.contract.limit, whole).await.is_err() {
            self.found(check, format!("a call never ended {when}"));
        }
    }

    async fn drops(&mut self) {
        const CHECK: &str = "drop";
        // Before the first poll, then after one pending poll more each time.
        for polls in 0..=self.contract.max_polls {
            let mut trial = self.trial();
            if !self.ready(CHECK, &mut trial.service).await {
                return;
            }
            let mut call = Box::pin(trial.service.call((self.request)()));
            let step = match polls {
                0 => Step::Dropped,
                n => self.step(&mut call, n - 1).await,
            };
            let when = match polls {
                0 => "after its future was dropped unpolled".to_string(),
                n => format!("after its future was dropped at pending poll {n}"),
            };
            let over = match step {
                Step::Done(reply) => {
                    drop(reply);
                    true
                }
                Step::Dropped => false,
                Step::Stuck => {
                    self.found(CHECK, "a future was never woken again");
                    true
                }
            };
            drop(call);
            self.close(CHECK, &trial, &when).await;
            let clone = trial.service.clone();
            self.whole(CHECK, &clone, &when).await;
            drop(clone);
            self.close(CHECK, &trial, &when).await;
            if over {
                break;
            }
        }
        // The reply unread, then half read.
        for frames in [0, 1] {
            let mut trial = self.trial();
            if !self.ready(CHECK, &mut trial.service).await {
                return;
            }
            let call = trial.service.call((self.request)());
            let when =
                ["after its reply was dropped unread", "after its reply was dropped half read"][frames];
            if let Ok(Ok(reply)) = bounded(self.contract.limit, call).await
                && bounded(self.contract.limit, reply.read(Some(frames))).await.is_err()
            {
                self.found(CHECK, "a body never gave a frame");
            }
            self.close(CHECK, &trial, when).await;
            self.whole(CHECK, &trial.service.clone(), when).await;
        }
    }

    async fn drop_ready(&mut self) {
        const CHECK: &str = "drop-ready";
        for polls in 0..8 {
            let trial = self.trial();
            let mut waiting = trial.service.clone();
            let step = {
                let mut ready = Box::pin(waiting.ready());
                self.step(&mut ready, polls).await.is_done()
            };
            drop(waiting);
            let when = "after a waiting service was dropped";
            self.close(CHECK, &trial, when).await;
            self.whole(CHECK, &trial.service.clone(), when).await;
            if step {
                break;
            }
        }
        let trial = self.trial();
        for _ in 0..32 {
            let mut unused = trial.service.clone();
            if !self.ready(CHECK, &mut unused).await {
                break;
            }
        }
        let when = "after ready services were dropped uncalled";
        self.close(CHECK, &trial, when).await;
        self.whole(CHECK, &trial.service.clone(), when).await;
        self.close(CHECK, &trial, when).await;
    }

    async fn ready_error(&mut self) {
        const CHECK: &str = "ready-error";
        let trial = self.trial();
        match bounded(self.contract.limit, trial.service.clone().oneshot((self.request)())).await {
            Ok(Err(_)) => {}
            Ok(Ok(_)) => self.found(CHECK, "a reply although the inner service was never ready"),
            Err(_) => self.found(CHECK, "an error of poll_ready was swallowed: the caller waits for ever"),
        }
        self.close(CHECK, &trial, "after poll_ready failed").await;
    }
}

impl<T> Step<T> {
    fn is_done(&self) -> bool {
        !matches!(self, Self::Dropped)
    }
}
