//! Each layer enforces, observes or stands aside, and is switched while it runs.

mod common;

use bytes::Bytes;
use common::{Answer, Request, Script, answer, ms, request, secs};
use http_body_util::{BodyExt, StreamBody};
use proptest::{prelude::*, test_runner::TestCaseError};
use std::{
    convert::Infallible,
    sync::{
        Arc, Mutex,
        atomic::{AtomicU64, Ordering::SeqCst},
    },
    time::Duration,
};
use tokio::time::{Instant, sleep};
use tower::{Layer, Service, ServiceBuilder, ServiceExt, service_fn};
use tower_herd::{
    AttemptTimeout, AttemptTimeoutLayer, BoxError, Budget, Classify, ClassifyLayer, CloneRequest, Exhausted,
    Fleet, FleetLimitLayer, HasTask, HashedFailover, HashedFailoverLayer, HttpClassify, JitteredRetryLayer,
    Mode, Provider, ProviderSettings, Refusal, RefusalKind, Resend, RetryAfterLayer, Safety, Signal, Switch,
    Task, TaskLayer,
    failover::Rung,
    observe::{Event, Observe},
};

const MODES: [Mode; 3] = [Mode::Enforce, Mode::Observe, Mode::Off];

/// Notes whom an observing layer would have refused, and as what.
#[derive(Clone, Default)]
struct Log(Arc<Mutex<Vec<(String, RefusalKind)>>>);

impl Observe for Log {
    fn observe(&self, event: &Event<'_>) {
        if let Event::WouldRefuse { provider, kind, .. } = *event {
            self.0.lock().unwrap().push((provider.to_owned(), kind));
        }
    }
}

impl Log {
    fn kinds(&self) -> Vec<RefusalKind> {
        self.0.lock().unwrap().iter().map(|(_, kind)| *kind).collect()
    }
}

fn logged() -> (Fleet, Log) {
    let log = Log::default();
    (Fleet::local().observer(log.clone()), log)
}

fn ceiling(fleet: &Fleet, name: &str, slots: u32) -> Provider {
    fleet.configure(name, ProviderSettings::new().ceiling(slots).aborts(true)).unwrap()
}

fn status(reply: &http::Response<String>) -> u16 {
    reply.status().as_u16()
}

// -------------------------------------------------------------------------------------- fleet limit

#[tokio::test(start_paused = true)]
async fn a_limit_that_observes_lets_those_beyond_the_ceiling_pass_and_counts_them() {
    let (fleet, log) = logged();
    let p = ceiling(&fleet, "p", 1);
    let switch = Switch::default();
    let script = Script::always(answer(200).after(ms(100)));
    // Switched while it runs: one layer, one service.
    let layer = FleetLimitLayer::new(&p).until_reply().switch(&switch);
    let service = layer.layer(script.clone());
    for (mode, took, in_flight, counted) in [
        (Mode::Enforce, 300, 1, 0),
        (Mode::Observe, 100, 1, 2),
        (Mode::Off, 100, 0, 2),
        (Mode::Enforce, 300, 1, 2),
    ] {
        switch.set(mode);
        let start = Instant::now();
        let calls: Vec<_> = (0..3).map(|i| tokio::spawn(service.clone().oneshot(request(i)))).collect();
        sleep(ms(50)).await;
        assert_eq!(p.in_flight(), in_flight, "{mode:?}");
        for call in calls {
            assert_eq!(status(&call.await.unwrap().unwrap()), 200);
        }
        assert_eq!(start.elapsed(), ms(took), "{mode:?}");
        assert_eq!((p.in_flight(), p.waiting()), (0, 0), "{mode:?}");
        assert_eq!(switch.would_refuse(), counted, "{mode:?}");
    }
    assert_eq!(log.kinds(), [RefusalKind::NoSlot; 2]);
    assert_eq!(layer.handle().would_refuse(), 2);
}

#[tokio::test(start_paused = true)]
async fn who_passes_without_a_slot_takes_none_from_those_who_wait() {
    let p = ceiling(&Fleet::local(), "p", 1);
    let script = Script::always(answer(200).after(ms(100)));
    let enforcing = FleetLimitLayer::new(&p).until_reply().layer(script.clone());
    let observing =
        FleetLimitLayer::new(&p).until_reply().switch(&Switch::new(Mode::Observe)).layer(script.clone());
    let start = Instant::now();
    let first = tokio::spawn(enforcing.clone().oneshot(request(1)));
    tokio::task::yield_now().await;
    let second = tokio::spawn(enforcing.oneshot(request(2)));
    let mut passing = Vec::new();
    for i in 0..30 {
        sleep(ms(5)).await;
        passing.push(tokio::spawn(observing.clone().oneshot(request(10 + i))));
        assert!(p.in_flight() <= 1);
    }
    first.await.unwrap().unwrap();
    second.await.unwrap().unwrap();
    assert_eq!(start.elapsed(), ms(200), "the second had its slot as soon as the first gave it back");
    for call in passing {
        call.await.unwrap().unwrap();
    }
    assert_eq!((p.in_flight(), p.waiting()), (0, 0));
}

#[tokio::test(start_paused = true)]
async fn a_call_without_a_slot_teaches_all_the_same() {
    for (mode, sensor, throttled) in [
        (Mode::Enforce, true, 1),
        (Mode::Observe, true, 2),
        (Mode::Off, true, 2),
        (Mode::Observe, false, 2),
        // Without a sensor nobody is left who looks.
        (Mode::Off, false, 0),
    ] {
        let p = ceiling(&Fleet::local(), "p", 1);
        let script = Script::always(answer(429).header("retry-after", 7).after(ms(10)));
        let switch = Switch::new(mode);
        let limit = FleetLimitLayer::new(&p).patience(Duration::ZERO).until_reply().switch(&switch);
        let inner = match sensor {
            true => common::Boxed::new(ClassifyLayer::new(&p).replies().layer(script)),
            false => common::Boxed::new(script.map_err(BoxError::from)),
        };
        let service = limit.layer(inner);
        let (one, two) = tokio::join!(service.clone().oneshot(request(1)), service.oneshot(request(2)));
        assert!(one.is_ok());
        assert_eq!(two.is_err(), mode == Mode::Enforce, "{mode:?}");
        assert_eq!(p.throttled(), throttled, "{mode:?}, sensor {sensor}");
        assert_eq!(p.paused_until().is_some(), throttled > 0);
        assert_eq!(p.in_flight(), 0);
    }
}

#[tokio::test(start_paused = true)]
async fn a_stream_that_passed_without_a_slot_reads_as_any_other() {
    let p = ceiling(&Fleet::local(), "p", 1);
    let script = Script::always(answer(200).body("hello"));
    let service = FleetLimitLayer::new(&p).switch(&Switch::new(Mode::Observe)).layer(script);
    let held = service.clone().oneshot(request(1)).await.unwrap();
    let passed = service.oneshot(request(2)).await.unwrap();
    assert_eq!(p.in_flight(), 1);
    assert_eq!(passed.into_body().collect().await.unwrap().to_bytes(), "hello");
    assert_eq!(p.in_flight(), 1, "it gave back no slot that it did not have");
    drop(held);
    assert_eq!(p.in_flight(), 0);
}

// -------------------------------------------------------------------------------------- retry after

#[tokio::test(start_paused = true)]
async fn a_pause_layer_that_observes_lets_calls_pass_in_a_pause_and_counts_them() {
    let (fleet, log) = logged();
    let p = fleet.provider("p");
    let switch = Switch::default();
    let script = Script::always(answer(200));
    let layer = RetryAfterLayer::new(&p).switch(&switch);
    let service = layer.layer(script.clone());
    for (mode, waits, counted) in
        [(Mode::Enforce, true, 0), (Mode::Observe, false, 1), (Mode::Off, false, 1), (Mode::Enforce, true, 1)]
    {
        switch.set(mode);
        p.pause_for(secs(5));
        let start = Instant::now();
        service.clone().oneshot(request(1)).await.unwrap();
        assert_eq!(start.elapsed() >= secs(5), waits, "{mode:?}");
        assert_eq!(start.elapsed().is_zero(), !waits, "{mode:?}");
        assert_eq!(layer.handle().would_refuse(), counted, "{mode:?}");
        p.clear_pause();
        sleep(secs(60)).await;
        service.clone().oneshot(request(1)).await.unwrap();
        assert_eq!(switch.would_refuse(), counted, "nothing is paused");
    }
    assert_eq!(log.kinds(), [RefusalKind::Paused]);
}

#[tokio::test(start_paused = true)]
async fn what_a_pause_layer_would_refuse_passes_in_a_stack_too() {
    for mode in MODES {
        let p = Fleet::local().provider("p");
        let switch = Switch::new(mode);
        let script =
            Script::new(|n, _| if n == 0 { answer(429).header("retry-after", 30) } else { answer(200) });
        let service = ServiceBuilder::new()
            .layer(RetryAfterLayer::new(&p).patience(Duration::ZERO).switch(&switch))
            .layer(FleetLimitLayer::new(&p).until_reply().switch(&switch))
            .layer(ClassifyLayer::new(&p).replies())
            .service(script.clone());
        assert_eq!(status(&service.clone().oneshot(request(1)).await.unwrap()), 429);
        let second = service.oneshot(request(2)).await;
        match mode {
            Mode::Enforce => {
                assert_eq!(Refusal::find(&*second.unwrap_err()).unwrap().kind, RefusalKind::Paused);
                assert_eq!(switch.would_refuse(), 0);
            }
            // Both layers would have kept it back, and both say so.
            Mode::Observe => assert_eq!((status(&second.unwrap()), switch.would_refuse()), (200, 2)),
            Mode::Off => assert_eq!((status(&second.unwrap()), switch.would_refuse()), (200, 0)),
        }
        assert_eq!(p.throttled(), 1, "the sensor learns in any mode");
    }
}

#[tokio::test(start_paused = true)]
async fn a_limit_that_enforces_below_a_pause_layer_that_is_off_still_obeys_the_pause() {
    let p = Fleet::local().provider("p");
    p.pause_for(secs(5));
    let start = Instant::now();
    let service = ServiceBuilder::new()
        .layer(RetryAfterLayer::new(&p).switch(&Switch::new(Mode::Off)))
        .layer(FleetLimitLayer::new(&p))
        .service(Script::always(answer(200)));
    service.oneshot(request(1)).await.unwrap();
    assert!(start.elapsed() >= secs(5));
}

// -------------------------------------------------------------------------------------------- retry

/// Counts what is asked of it.
#[derive(Clone, Default)]
struct Counting(Arc<[AtomicU64; 3]>);

impl Budget for Counting {
    fn deposit(&self) {
        self.0[0].fetch_add(1, SeqCst);
    }
    fn try_withdraw(&self) -> bool {
        self.0[1].fetch_add(1, SeqCst);
        true
    }
    fn refund(&self) {
        self.0[2].fetch_add(1, SeqCst);
    }
}

impl Counting {
    fn read(&self) -> [u64; 3] {
        [0, 1, 2].map(|i| self.0[i].load(SeqCst))
    }
}

/// Clones, and counts how often.
#[derive(Clone, Default)]
struct Keeping(Arc<AtomicU64>);

impl Resend<Request> for Keeping {
    type Kept = Request;
    fn keep(&self, request: &mut Request) -> Option<Request> {
        self.0.fetch_add(1, SeqCst);
        CloneRequest.keep(request)
    }
    fn again(&self, kept: &mut Request) -> Option<Request> {
        CloneRequest.again(kept)
    }
}

#[tokio::test(start_paused = true)]
async fn a_retry_that_observes_returns_the_first_reply_and_counts_what_it_would_have_sent_again() {
    let (switch, budget, keeping) = (Switch::default(), Counting::default(), Keeping::default());
    let script = Script::new(|_, request: &Request| {
        let again = request.resent().is_some();
        answer(if again { 200 } else { 503 })
    });
    let layer =
        JitteredRetryLayer::new().budget(budget.clone()).resend(keeping.clone()).switch(&switch).seed(1);
    let service = layer.layer(script.clone());
    for (mode, calls, replied, counted, pot, kept) in [
        (Mode::Enforce, 2, 200, 0, [1, 1, 0], 1),
        (Mode::Observe, 1, 503, 1, [2, 2, 1], 2),
        (Mode::Off, 1, 503, 1, [2, 2, 1], 2),
        (Mode::Enforce, 2, 200, 1, [3, 3, 1], 3),
    ] {
        switch.set(mode);
        let before = script.calls();
        let request = request(1);
        let task = request.task().cloned().unwrap();
        let reply = service.clone().oneshot(request).await.unwrap();
        assert_eq!((script.calls() - before, status(&reply)), (calls, replied), "{mode:?}");
        assert!(reply.extensions().get::<Exhausted>().is_none(), "it is no last reply of several");
        assert_eq!(task.spent(), u32::from(mode == Mode::Enforce), "{mode:?}");
        assert_eq!(layer.handle().would_refuse(), counted, "{mode:?}");
        assert_eq!((budget.read(), keeping.0.load(SeqCst)), (pot, kept), "{mode:?}");
    }
}

#[tokio::test(start_paused = true)]
async fn what_would_not_be_sent_again_is_not_counted() {
    for (status, safety, counted) in [
        (503, Safety::Safe, 1),
        (429, Safety::Once, 1), // it proves that nothing was executed
        (503, Safety::Once, 0),
        (404, Safety::Safe, 0),
        (501, Safety::Safe, 0),
        (200, Safety::Safe, 0),
    ] {
        let switch = Switch::new(Mode::Observe);
        let service = JitteredRetryLayer::new().switch(&switch).layer(Script::always(answer(status)));
        let mut request = request(1);
        request.extensions_mut().insert(safety);
        service.oneshot(request).await.unwrap();
        assert_eq!(switch.would_refuse(), counted, "{status} {safety:?}");
    }
}

// ----------------------------------------------------------------------------------------- failover

/// Two tiers of one rung each; the layers of each rung are those of a stack.
fn ladder(a: (&Provider, Answer), b: (&Provider, Answer), switch: &Switch) -> (common::Boxed, [Script; 2]) {
    let scripts = [Script::always(a.1), Script::always(b.1)];
    let rungs = [
        Rung::new(a.0, common::rung(a.0, scripts[0].clone())),
        Rung::new(b.0, common::rung(b.0, scripts[1].clone())).tier(1).map(|mut request: Request| {
            *request.uri_mut() = http::Uri::from_static("http://b.example/");
            request
        }),
    ];
    (common::Boxed::new(HashedFailover::new(rungs).unwrap().switch(switch)), scripts)
}

#[tokio::test(start_paused = true)]
async fn a_ladder_that_observes_stays_at_the_first_rung_and_counts_who_would_have_left() {
    let (fleet, log) = logged();
    let (a, b) = (fleet.provider("a"), fleet.provider("b"));
    let switch = Switch::default();
    let (service, scripts) = ladder((&a, answer(503)), (&b, answer(200)), &switch);
    for (mode, replied, calls, counted) in [
        (Mode::Enforce, 200, (1, 1), 0),
        (Mode::Observe, 503, (2, 1), 1),
        (Mode::Off, 503, (3, 1), 1),
        (Mode::Enforce, 200, (4, 2), 1),
    ] {
        switch.set(mode);
        let request = request(1);
        let task = request.task().cloned().unwrap();
        let reply = service.clone().oneshot(request).await.unwrap();
        assert_eq!(status(&reply), replied, "{mode:?}");
        let said = HttpClassify.provider(Ok(&reply));
        let walked = mode == Mode::Enforce;
        assert_eq!(said.as_deref(), (!walked).then_some("a"), "for the retry layer further out");
        assert_eq!((scripts[0].calls(), scripts[1].calls()), calls, "{mode:?}");
        assert_eq!(switch.would_refuse(), counted, "{mode:?}");
        assert_eq!(task.spent(), u32::from(mode == Mode::Enforce), "{mode:?}");
    }
    assert_eq!(*log.0.lock().unwrap(), [("a".to_owned(), RefusalKind::NoRung)]);
    assert_eq!((a.in_flight(), b.in_flight()), (0, 0));
}

#[tokio::test(start_paused = true)]
async fn a_ladder_that_observes_counts_who_finds_no_room_and_leaves_the_rest_to_the_rung() {
    let fleet = Fleet::local();
    for (mode, took, counted) in [(Mode::Enforce, 500, 0), (Mode::Observe, 2000, 1), (Mode::Off, 2000, 0)] {
        let name = format!("{mode:?}");
        let (a, b) = (ceiling(&fleet, &name, 1), fleet.provider(&format!("{name} b")));
        let switch = Switch::new(mode);
        let (service, scripts) = ladder((&a, answer(200).after(secs(1))), (&b, answer(200)), &switch);
        let start = Instant::now();
        // It holds the only slot, and replies well: no reply is counted.
        let first = tokio::spawn(service.clone().oneshot(request(1)));
        tokio::task::yield_now().await;
        service.oneshot(request(2)).await.unwrap();
        assert_eq!(start.elapsed(), ms(took), "{mode:?}: the limit of the rung goes on");
        first.await.unwrap().unwrap();
        assert_eq!(scripts[1].calls(), usize::from(mode == Mode::Enforce));
        assert_eq!(switch.would_refuse(), counted, "{mode:?}");
    }
}

#[tokio::test(start_paused = true)]
async fn a_refusal_of_the_first_rung_is_returned_where_nobody_walks() {
    for mode in MODES {
        let fleet = Fleet::local();
        let (a, b) = (fleet.provider("a"), fleet.provider("b"));
        let switch = Switch::new(mode);
        a.pause_for(secs(3600));
        let (service, _) = ladder((&a, answer(200)), (&b, answer(200)), &switch);
        let outcome = service.oneshot(common::until(1, secs(5))).await;
        assert_eq!(outcome.is_ok(), mode == Mode::Enforce, "{mode:?}");
        if let Err(error) = outcome {
            assert_eq!(Refusal::find(&*error).unwrap().kind, RefusalKind::Paused);
        }
        assert_eq!(switch.would_refuse(), u64::from(mode == Mode::Observe), "once for each call");
    }
}

// Law 4 is no decision of the ladder: it belongs to the request.
#[tokio::test(start_paused = true)]
async fn a_keyed_write_stays_with_its_provider_though_the_ladder_is_switched_off() {
    for mode in MODES {
        let fleet = Fleet::local();
        let (a, b) = (fleet.provider("a"), fleet.provider("b"));
        let switch = Switch::default();
        a.pause_for(secs(60));
        let (service, scripts) = ladder((&a, answer(200)), (&b, answer(500)), &switch);
        let mut keyed = request(1);
        keyed.extensions_mut().insert(Safety::Keyed);
        assert_eq!(status(&service.clone().oneshot(keyed.clone()).await.unwrap()), 500);
        a.clear_pause();
        switch.set(mode);
        assert_eq!(status(&service.oneshot(keyed).await.unwrap()), 500, "{mode:?}");
        assert_eq!((scripts[0].calls(), scripts[1].calls()), (0, 2), "{mode:?}");
    }
}

#[tokio::test(start_paused = true)]
async fn the_layer_form_has_the_switch_too() {
    let fleet = Fleet::local();
    let switch = Switch::new(Mode::Off);
    let rung =
        |name: &str| Rung::new(&fleet.provider(name), ClassifyLayer::new(&fleet.provider(name)).replies());
    let ladder = HashedFailoverLayer::new([rung("a"), rung("b").tier(1)]).unwrap().switch(&switch);
    assert_eq!(ladder.handle().mode(), Mode::Off);
    let script = Script::new(|n, _| answer(if n == 0 { 503 } else { 200 }));
    let service = ladder.layer(script.clone());
    assert_eq!(service.handle().mode(), Mode::Off);
    assert_eq!(status(&service.clone().oneshot(request(1)).await.unwrap()), 503);
    assert_eq!(status(&service.oneshot(request(1)).await.unwrap()), 200);
    assert_eq!(script.calls(), 2);
}

// ---------------------------------------------------------------------------------- attempt timeout

#[tokio::test(start_paused = true)]
async fn a_timeout_that_observes_counts_who_outlives_it_and_cuts_nobody() {
    let switch = Switch::default();
    let script = Script::always(answer(200).after(secs(10)));
    let layer = AttemptTimeoutLayer::new(secs(1)).switch(&switch);
    for replies in [false, true] {
        for mode in MODES {
            switch.set(mode);
            let before = layer.handle().would_refuse();
            let start = Instant::now();
            let outcome = if replies {
                layer.clone().replies().layer(script.clone()).oneshot(request(1)).await.map(drop)
            } else {
                layer.layer(script.clone()).oneshot(request(1)).await.map(drop)
            };
            match mode {
                Mode::Enforce => {
                    assert!(outcome.unwrap_err().is::<AttemptTimeout>());
                    assert_eq!(start.elapsed(), secs(1));
                }
                _ => {
                    outcome.unwrap();
                    assert_eq!(start.elapsed(), secs(10));
                }
            }
            assert_eq!(switch.would_refuse() - before, u64::from(mode == Mode::Observe), "{mode:?}");
        }
    }
}

#[tokio::test(start_paused = true)]
async fn the_deadline_of_the_task_binds_an_attempt_only_where_the_timeout_enforces() {
    let switch = Switch::default();
    let service =
        AttemptTimeoutLayer::default().switch(&switch).layer(Script::always(answer(200).after(secs(9))));
    for (mode, ok, counted) in [(Mode::Enforce, false, 0), (Mode::Observe, true, 1), (Mode::Off, true, 1)] {
        switch.set(mode);
        let outcome = service.clone().oneshot(common::until(1, secs(2))).await;
        assert_eq!((outcome.is_ok(), switch.would_refuse()), (ok, counted), "{mode:?}");
    }
}

#[tokio::test(start_paused = true)]
async fn a_silent_body_is_counted_once_and_read_to_its_end() {
    let inner = service_fn(|_: Request| async {
        let pieces = futures_util::stream::unfold(0, |n| async move {
            sleep(secs(5)).await;
            (n < 3).then(|| (Ok::<_, Infallible>(http_body::Frame::data(Bytes::from_static(b"x"))), n + 1))
        });
        Ok::<_, Infallible>(http::Response::new(StreamBody::new(Box::pin(pieces))))
    });
    let switch = Switch::default();
    let service = AttemptTimeoutLayer::default().idle(secs(1)).switch(&switch).layer(inner);
    for (mode, counted) in [(Mode::Enforce, 0), (Mode::Observe, 1), (Mode::Off, 1)] {
        switch.set(mode);
        let reply = service.clone().oneshot(request(1)).await.unwrap();
        let body = reply.into_body().collect().await;
        match mode {
            Mode::Enforce => assert!(body.unwrap_err().is::<AttemptTimeout>()),
            _ => assert_eq!(body.unwrap().to_bytes(), "xxx"),
        }
        assert_eq!(switch.would_refuse(), counted, "{mode:?}: three silences of one call");
    }
}

// ------------------------------------------------------------------------------ sensor and the tasks

/// A stack of the gates and a sensor, of either kind, that can be switched.
async fn throttled_through(p: &Provider, switch: &Switch, bodies: bool) -> bool {
    let script = Script::always(answer(429).header("retry-after", 1));
    let gates = ServiceBuilder::new()
        .layer(RetryAfterLayer::new(p))
        .layer(FleetLimitLayer::new(p).until_reply())
        .into_inner();
    let sensor = ClassifyLayer::new(p).switch(switch);
    assert_eq!(sensor.handle().mode(), switch.mode());
    if bodies {
        let reply = gates.layer(sensor.layer(script)).oneshot(request(1)).await.unwrap();
        reply.extensions().get::<Signal>().is_some()
    } else {
        let reply = gates.layer(sensor.replies().layer(script)).oneshot(request(1)).await.unwrap();
        reply.extensions().get::<Signal>().is_some()
    }
}

#[tokio::test(start_paused = true)]
async fn a_sensor_that_is_off_reads_nothing_and_nobody_learns_in_its_place() {
    for bodies in [true, false] {
        let p = Fleet::local().provider("p");
        let switch = Switch::default();
        let mut known = 0;
        for mode in [Mode::Off, Mode::Observe, Mode::Enforce, Mode::Off] {
            switch.set(mode);
            let stamped = throttled_through(&p, &switch, bodies).await;
            known += u64::from(mode != Mode::Off);
            assert_eq!((stamped, p.throttled()), (mode != Mode::Off, known), "{mode:?}, bodies {bodies}");
            assert_eq!(p.paused_until().is_some(), mode != Mode::Off, "{mode:?}");
            assert_eq!(p.in_flight(), 0);
            sleep(secs(60)).await;
        }
        assert_eq!(switch.would_refuse(), 0);
    }
}

#[tokio::test(start_paused = true)]
async fn a_task_layer_that_is_off_starts_none() {
    let switch = Switch::default();
    let layer = TaskLayer::new().switch(&switch);
    assert_eq!(layer.handle().mode(), Mode::Enforce);
    let script = Script::always(answer(200));
    let service = layer.clone().deadline(secs(5)).layer(script.clone());
    for mode in MODES {
        switch.set(mode);
        service.clone().oneshot(http::Request::new(String::new())).await.unwrap();
        let own = Task::new("own");
        let mut request = request(1);
        request.set_task(own.clone());
        service.clone().oneshot(request).await.unwrap();
        let seen: Vec<_> = script.seen.lock().unwrap().drain(..).map(|(_, task, _)| task).collect();
        assert_eq!(seen[0].is_some(), mode != Mode::Off, "{mode:?}");
        assert!(seen[1].as_ref().unwrap().is(&own), "a request keeps its own");
    }
}

// ------------------------------------------------------------------------------------- a whole stack

/// What a stack does that is switched off as a whole is what the client alone does.
#[tokio::test(start_paused = true)]
async fn a_stack_that_is_off_is_the_bare_client() {
    async fn outcome<S>(mut service: S, script: &Script) -> (Vec<u16>, usize, Duration)
    where
        S: Service<Request, Response = http::Response<String>, Error: Into<BoxError>>,
    {
        let start = Instant::now();
        let mut replies = Vec::new();
        for i in 0..6 {
            let service = service.ready().await.map_err(Into::into).unwrap();
            replies.push(status(&service.call(request(i)).await.map_err(Into::into).unwrap()));
        }
        (replies, script.calls(), start.elapsed())
    }
    let answers = |n: usize, _: &Request| match n % 3 {
        0 => answer(429).header("retry-after", 30).after(ms(20)),
        1 => answer(503).after(secs(40)),
        _ => answer(200).after(ms(20)),
    };
    let bare = Script::new(answers);
    let stacked = Script::new(answers);
    let p = ceiling(&Fleet::local(), "p", 1);
    let off = Switch::new(Mode::Off);
    let stack = ServiceBuilder::new()
        .layer(TaskLayer::new().switch(&off))
        .layer(JitteredRetryLayer::new().switch(&off))
        .layer(RetryAfterLayer::new(&p).switch(&off))
        .layer(FleetLimitLayer::new(&p).until_reply().switch(&off))
        .layer(ClassifyLayer::new(&p).replies().switch(&off))
        .layer(AttemptTimeoutLayer::new(secs(1)).replies().switch(&off))
        .service(stacked.clone());
    assert_eq!(outcome(stack, &stacked).await, outcome(bare.clone(), &bare).await);
    assert_eq!((off.would_refuse(), p.throttled(), p.in_flight()), (0, 0, 0));
    assert!(p.paused_until().is_none());
}

proptest! {
    /// Whoever is switched while calls run, wait and are given up: all is given back, and those that have a
    /// slot are never more than the ceiling.
    #[test]
    fn switching_at_any_time_loses_nothing(
        steps in proptest::collection::vec((0..MODES.len(), 0..MODES.len(), 0..MODES.len(), 0u64..60, 0u64..400), 1..80),
        slots in 1u32..4,
    ) {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().start_paused(true).build().unwrap();
        let passed: Result<(), TestCaseError> = runtime.block_on(async {
            let p = ceiling(&Fleet::local(), "p", slots);
            let switches = [Switch::default(), Switch::default(), Switch::default()];
            let script = Script::new(|n, _| match n % 7 {
                3 => answer(429).header("retry-after-ms", 40).after(ms(3)),
                5 => answer(503).after(ms(20)),
                _ => answer(200).after(ms(30)),
            });
            let service = ServiceBuilder::new()
                .layer(RetryAfterLayer::new(&p).switch(&switches[0]))
                .layer(FleetLimitLayer::new(&p).until_reply().switch(&switches[1]))
                .layer(ClassifyLayer::new(&p).replies().switch(&switches[2]))
                .service(script);
            let mut calls = Vec::new();
            for (i, (pause, limit, sensor, wait, patience)) in steps.into_iter().enumerate() {
                for (switch, mode) in switches.iter().zip([pause, limit, sensor]) {
                    switch.set(MODES[mode]);
                }
                let call = service.clone().oneshot(request(i as u64));
                calls.push(tokio::spawn(tokio::time::timeout(ms(patience), call)));
                sleep(ms(wait)).await;
                prop_assert!(p.in_flight() <= slots, "{} of {slots}", p.in_flight());
            }
            for call in calls {
                // Given up, refused or replied: that is not the question here.
                call.await.unwrap().ok();
            }
            prop_assert_eq!((p.in_flight(), p.waiting()), (0, 0));
            for switch in &switches {
                switch.set(Mode::Enforce);
            }
            let last = service.oneshot(request(0)).await;
            prop_assert!(last.is_ok(), "{:?}", last.err());
            Ok(())
        });
        passed?;
    }
}
