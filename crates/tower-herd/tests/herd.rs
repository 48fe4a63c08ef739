//! The whole stack from one builder: that it is the stack, that its short way is the layers' way, and that
//! it can be steered.
#![cfg(feature = "herd")]

use bytes::Bytes;
use http_body::Body as _;
use http_body_util::{BodyExt, Full, StreamBody};
use proptest::prelude::*;
use std::{
    collections::VecDeque,
    convert::Infallible,
    sync::{
        Arc, Mutex,
        atomic::{AtomicUsize, Ordering},
    },
    time::Duration,
};
use tokio::time::{Instant, sleep};
use tower::{Layer, Service, ServiceBuilder, ServiceExt, service_fn};
use tower_herd::{
    AttemptTimeout, AttemptTimeoutLayer, AttemptsLayer, BoxError, BreakerLayer, BudgetLayer, ClassifyLayer,
    Exhausted, Fleet, FleetLimitLayer, Herd, JitteredRetryLayer, Kind, Mode, Provider, ProviderSettings,
    RampedReadmissionLayer, RatioBudget, Refusal, RefusalKind, RetryAfterLayer, Safety, Signal, Task,
    TaskLayer, TokenLimitLayer,
    breaker::BreakerSettings,
    budget::BudgetSettings,
    failover::Rung,
    herd::{Concern, HerdConfig, HerdError, RungConfig, RungSettings},
};

type Request = http::Request<Full<Bytes>>;
type Reply = http::Response<Full<Bytes>>;

const MS: fn(u64) -> Duration = Duration::from_millis;
const S: fn(u64) -> Duration = Duration::from_secs;

/// As other layers ask of the body of a client.
const fn is_a_body<B: http_body::Body + Default + Send + Sync + 'static>() {}
const _: () = is_a_body::<tower_herd::herd::HerdBody<Full<Bytes>>>();

/// What the provider does with its next calls; after the last one it answers 200.
#[derive(Clone, Copy, Debug)]
enum Does {
    Answers(u16),
    Waits(u64, u16),
    Throttles(u64),
    Breaks,
    Hangs,
}

/// A scripted provider, and when it was called.
#[derive(Clone, Default)]
struct Script {
    next: Arc<Mutex<VecDeque<Does>>>,
    calls: Arc<Mutex<Vec<Instant>>>,
}

impl Script {
    fn new(does: impl IntoIterator<Item = Does>) -> Self {
        Script { next: Arc::new(Mutex::new(does.into_iter().collect())), ..Script::default() }
    }

    fn calls(&self) -> usize {
        self.calls.lock().unwrap().len()
    }

    fn service(
        &self,
    ) -> impl Service<Request, Response = Reply, Error = std::io::Error, Future: Send> + Clone + Send + use<>
    {
        let script = self.clone();
        service_fn(move |_: Request| {
            script.calls.lock().unwrap().push(Instant::now());
            let does = script.next.lock().unwrap().pop_front().unwrap_or(Does::Answers(200));
            async move {
                let reply = |status: u16| http::Response::builder().status(status);
                let body = Full::from("{}");
                match does {
                    Does::Answers(status) => Ok(reply(status).body(body).unwrap()),
                    Does::Waits(millis, status) => {
                        sleep(MS(millis)).await;
                        Ok(reply(status).body(body).unwrap())
                    }
                    Does::Throttles(seconds) => {
                        Ok(reply(429).header("retry-after", seconds).body(body).unwrap())
                    }
                    Does::Breaks => Err(std::io::Error::other("reset")),
                    Does::Hangs => std::future::pending().await,
                }
            }
        })
    }
}

fn costly() -> Request {
    http::Request::post("http://p/").extension(Safety::Costly).body(Full::from("{}")).unwrap()
}

fn of_task(key: u64) -> Request {
    let mut request = costly();
    request.extensions_mut().insert(Task::new(key).deadline_in(S(60)));
    request
}

fn rung(name: &str) -> RungConfig {
    let mut rung = RungConfig::default();
    rung.provider = name.into();
    rung
}

fn kind(error: &BoxError) -> Option<RefusalKind> {
    Refusal::find(&**error).map(|refusal| refusal.kind)
}

/// The stack as one would write it by hand.
fn by_hand<S>(
    provider: &Provider,
    seed: u64,
    inner: S,
) -> impl Service<
    Request,
    Response = http::Response<impl http_body::Body<Data = Bytes, Error = BoxError>>,
    Error = BoxError,
> + Clone
where
    S: Service<Request, Response = Reply, Error = std::io::Error> + Clone,
{
    ServiceBuilder::new()
        .layer(TaskLayer::new())
        .layer(JitteredRetryLayer::new().seed(seed))
        .layer(RampedReadmissionLayer::new(provider))
        .layer(BreakerLayer::new(provider))
        .layer(BudgetLayer::new(provider))
        .layer(RetryAfterLayer::new(provider))
        .layer(TokenLimitLayer::new(provider))
        .layer(FleetLimitLayer::new(provider))
        .layer(AttemptsLayer::new(provider))
        .layer(ClassifyLayer::new(provider))
        .layer(AttemptTimeoutLayer::default())
        .service(inner)
}

/// What a caller can see of a call, and what is known of the provider afterwards.
#[derive(Debug, PartialEq)]
struct Seen {
    outcome: Result<u16, String>,
    exhausted: bool,
    calls: usize,
    in_flight: u32,
    paused: Option<Duration>,
    throttled: u64,
}

fn does() -> impl Strategy<Value = Does> {
    prop_oneof![
        4 => Just(Does::Answers(200)),
        2 => Just(Does::Answers(503)),
        1 => Just(Does::Answers(404)),
        1 => Just(Does::Answers(401)),
        1 => (1..40_000u64, prop_oneof![Just(200u16), Just(500)]).prop_map(|(millis, status)| Does::Waits(millis, status)),
        2 => (0..20u64).prop_map(Does::Throttles),
        2 => Just(Does::Breaks),
        1 => Just(Does::Hangs),
    ]
}

async fn play<S, B>(service: S, provider: &Provider, script: &Script, many: usize) -> Vec<Seen>
where
    S: Service<Request, Response = http::Response<B>, Error = BoxError> + Clone,
    B: http_body::Body<Data = Bytes, Error = BoxError>,
{
    let began = Instant::now();
    let mut seen = Vec::new();
    for key in 0..many as u64 {
        let outcome = service.clone().oneshot(of_task(key)).await;
        let exhausted = outcome.as_ref().is_ok_and(|reply| reply.extensions().get::<Exhausted>().is_some());
        let outcome = match outcome {
            Ok(reply) => {
                let status = reply.status().as_u16();
                reply.into_body().collect().await.map(|_| status).map_err(|error| error.to_string())
            }
            // When it may be tried again differs by the jitter of what came before.
            Err(error) => {
                Err(kind(&error).map_or_else(|| error.to_string(), |kind| kind.as_str().to_owned()))
            }
        };
        seen.push(Seen {
            outcome,
            exhausted,
            calls: script.calls(),
            in_flight: provider.in_flight(),
            paused: provider.paused_until().map(|(until, _)| until - began),
            throttled: provider.throttled(),
        });
    }
    seen
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 200, ..ProptestConfig::default() })]

    // The short way is written out beside the layers; this is what holds the two together.
    #[test]
    fn a_herd_is_the_stack_of_its_layers(script in prop::collection::vec(does(), 0..24), seed: u64, ceiling in prop::option::of(1..4u32)) {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_time().start_paused(true).build().unwrap();
        let provider = |name: &str| {
            let settings = ProviderSettings::new().aborts(true);
            let settings = match ceiling { Some(slots) => settings.ceiling(slots), None => settings };
            Fleet::local().seed(seed).configure(name, settings).unwrap()
        };
        let many = script.len() + 2;
        let run = |herd: bool| runtime.block_on(async {
            let provider = provider("p");
            let script = Script::new(script.clone());
            // Whom the throttle sends away is drawn: here nobody.
            let settings = RungSettings::new().budget(BudgetSettings::new().k(1e6));
            let herds = Herd::new(&provider).settings(settings).unwrap();
            if herd {
                let herd = herds.seed(seed);
                play(herd.layer(script.service()), &provider, &script, many).await
            } else {
                play(by_hand(&provider, seed, script.service()), &provider, &script, many).await
            }
        });
        let (herd, hand) = (run(true), run(false));
        for (herd, hand) in herd.iter().zip(&hand) {
            prop_assert_eq!(&herd.outcome, &hand.outcome);
            prop_assert_eq!(herd.calls, hand.calls);
            prop_assert_eq!((herd.exhausted, herd.in_flight, herd.throttled), (hand.exhausted, hand.in_flight, hand.throttled));
            prop_assert_eq!(herd.paused, hand.paused);
        }
    }
}

#[tokio::test(start_paused = true)]
async fn what_fails_is_sent_again_and_what_is_throttled_waits() {
    let script = Script::new([Does::Answers(503), Does::Throttles(7)]);
    let provider = Fleet::local().provider("p");
    let service = Herd::new(&provider).layer(script.service());
    let reply = service.oneshot(costly()).await.unwrap();
    assert_eq!(reply.status(), 200);
    let calls = script.calls.lock().unwrap().clone();
    assert_eq!(calls.len(), 3);
    assert!(calls[2] - calls[1] >= S(7), "never early");
}

#[tokio::test(start_paused = true)]
async fn a_call_that_is_well_holds_its_slot_and_is_under_way_until_its_body_ends() {
    let provider = Fleet::local().provider("p");
    let herd = Herd::new(&provider);
    let handle = herd.handle();
    let service = herd.layer(Script::default().service());
    let reply = service.clone().oneshot(costly()).await.unwrap();
    assert_eq!((provider.in_flight(), handle.under_way()), (1, 1));
    assert!(!reply.body().is_end_stream() && reply.body().size_hint().exact() == Some(2));
    assert_eq!(reply.into_body().collect().await.unwrap().to_bytes(), "{}");
    assert_eq!((provider.in_flight(), handle.under_way()), (0, 0));
    // Dropped unread, it may still run there: the slot lingers, the call is not under way.
    drop(service.oneshot(costly()).await.unwrap());
    assert_eq!((provider.in_flight(), handle.under_way()), (1, 0));
}

#[tokio::test(start_paused = true)]
async fn a_dropped_call_is_given_up_at_each_await_point() {
    let provider = Fleet::local().configure("p", ProviderSettings::new().aborts(true)).unwrap();
    for does in [Does::Hangs, Does::Waits(50, 503), Does::Throttles(30), Does::Answers(503)] {
        let herd = Herd::new(&provider);
        let handle = herd.handle();
        let service = herd.layer(Script::new([does]).service());
        for millis in [0, 10, 60, 700] {
            drop(tokio::time::timeout(MS(millis), service.clone().oneshot(costly())).await);
            assert_eq!((provider.in_flight(), handle.under_way()), (0, 0), "{does:?} after {millis} ms");
            provider.clear_pause();
        }
    }
}

#[tokio::test(start_paused = true)]
async fn an_attempt_and_a_silent_body_time_out() {
    let provider = Fleet::local().provider("p");
    let herd = || Herd::new(&provider).attempts(1).attempt_timeout(S(3), S(5));
    let began = Instant::now();
    let error = herd().layer(Script::new([Does::Hangs]).service()).oneshot(costly()).await.unwrap_err();
    assert!(error.is::<AttemptTimeout>() && began.elapsed() >= S(3), "{error}");
    assert_eq!(provider.in_flight(), 1, "it may still run there");
    let silent = service_fn(|_: Request| async {
        let frames = futures_util::stream::pending::<Result<http_body::Frame<Bytes>, Infallible>>();
        Ok::<_, Infallible>(http::Response::new(StreamBody::new(frames)))
    });
    let began = Instant::now();
    let mut body = herd().layer(silent).oneshot(costly()).await.unwrap().into_body();
    let error = body.frame().await.unwrap().unwrap_err();
    assert!(error.is::<AttemptTimeout>() && began.elapsed() >= S(5), "{error}");
    assert!(body.is_end_stream() && body.frame().await.is_none());
}

/// A task ends when it ends, whoever started it.
#[tokio::test(start_paused = true)]
async fn no_attempt_outlives_the_task() {
    let provider = Fleet::local().provider("p");
    let began = Instant::now();
    let service = Herd::new(&provider).deadline(S(10)).layer(Script::new([Does::Hangs; 9]).service());
    service.clone().oneshot(costly()).await.unwrap_err();
    assert!(began.elapsed() <= S(10) + MS(2), "{:?}", began.elapsed());
    let began = Instant::now();
    let mut request = costly();
    request.extensions_mut().insert(Task::new(1).deadline_in(S(4)));
    service.oneshot(request).await.unwrap_err();
    assert!(began.elapsed() <= S(4) + MS(2), "{:?}", began.elapsed());
}

#[tokio::test(start_paused = true)]
async fn a_ladder_goes_to_the_next_rung_and_waits_nowhere() {
    let fleet = Fleet::local();
    let (a, b) = (Script::new([Does::Throttles(60)]), Script::default());
    let to = |name: &'static str| {
        move |mut request: Request| {
            request.extensions_mut().insert(name);
            request
        }
    };
    let rungs = [
        Rung::new(&fleet.provider("a"), RungSettings::new()).map(to("a")),
        Rung::new(&fleet.provider("b"), RungSettings::new()).tier(1).paid().map(to("b")),
    ];
    let (at_a, at_b) = (a.service(), b.service());
    let client = service_fn(move |request: Request| {
        let name = *request.extensions().get::<&'static str>().unwrap();
        if name == "a" { at_a.clone().oneshot(request) } else { at_b.clone().oneshot(request) }
    });
    let client = service_fn(move |request: Request| {
        let mut client = client.clone();
        async move { client.call(request).await }
    });
    drop(client);
    let (at_a, at_b) = (a.clone(), b.clone());
    let client = service_fn(move |request: Request| {
        let script = if request.extensions().get::<&'static str>() == Some(&"a") {
            at_a.clone()
        } else {
            at_b.clone()
        };
        async move { script.service().oneshot(request).await }
    });
    let service = Herd::ladder(rungs).unwrap().layer(client);
    let began = Instant::now();
    for _ in 0..5 {
        assert_eq!(service.clone().oneshot(costly()).await.unwrap().status(), 200);
    }
    assert_eq!((a.calls(), b.calls()), (1, 5));
    assert!(began.elapsed() < S(1));
    sleep(S(61)).await;
    service.oneshot(costly()).await.unwrap();
    assert_eq!(a.calls(), 2, "the cheapest rung again");
}

#[tokio::test(start_paused = true)]
async fn a_broken_provider_is_not_called_and_somebody_is_told_once() {
    let provider = Fleet::local().provider("p");
    let alerts = Arc::new(AtomicUsize::new(0));
    let counted = alerts.clone();
    let herd = Herd::new(&provider)
        .settings(RungSettings::new().breaker(BreakerSettings::strict()))
        .unwrap()
        .attempts(1)
        .on_alert(move |_| {
            counted.fetch_add(1, Ordering::Relaxed);
        });
    let script = Script::new(vec![Does::Answers(500); 50]);
    let service = herd.layer(script.service());
    let mut open = 0;
    for _ in 0..30 {
        match service.clone().oneshot(costly()).await {
            Ok(_) => {}
            Err(error) => open += usize::from(kind(&error) == Some(RefusalKind::Open)),
        }
    }
    assert!(script.calls() <= 6 && open >= 20, "{} calls, {open} refused", script.calls());
    assert_eq!(alerts.load(Ordering::Relaxed), 1);
}

#[tokio::test(start_paused = true)]
async fn each_concern_can_be_switched_and_counts_what_it_would_have_done() {
    let provider = Fleet::local().configure("p", ProviderSettings::new().ceiling(1)).unwrap();
    // Nobody is sent away by chance.
    let settings = RungSettings::new().budget(BudgetSettings::new().k(1e6));
    let herd = Herd::new(&provider).settings(settings).unwrap();
    let handle = herd.handle();
    handle.set_all(Mode::Observe);
    for concern in Concern::ALL {
        let kept = matches!(concern, Concern::Sensor | Concern::Timeout);
        assert_eq!(handle.mode(concern), if kept { Mode::Enforce } else { Mode::Observe }, "{concern:?}");
    }
    let script = Script::new([Does::Answers(503), Does::Throttles(60)]);
    let service = herd.layer(script.service());
    // Not sent again, but counted.
    assert_eq!(service.clone().oneshot(costly()).await.unwrap().status(), 503);
    assert_eq!(handle.would_refuse(Concern::Retry), 1);
    // Nobody waits for the pause.
    assert_eq!(service.clone().oneshot(costly()).await.unwrap().status(), 429);
    let held = service.clone().oneshot(costly()).await.unwrap();
    assert_eq!((held.status().as_u16(), handle.would_refuse(Concern::Pause)), (200, 1));
    // Enforced again, at once. (That it is well has ended the pause.)
    handle.set_all(Mode::Enforce);
    provider.pause_for(S(60));
    let mut request = costly();
    request.extensions_mut().insert(Task::new(1).deadline_in(S(5)));
    let error = service.clone().oneshot(request).await.unwrap_err();
    assert_eq!(kind(&error), Some(RefusalKind::Paused));
    handle.set(Concern::Pause, Mode::Off);
    handle.set(Concern::Limit, Mode::Off);
    assert_eq!(service.oneshot(costly()).await.unwrap().status(), 200);
    assert_eq!(handle.would_refuse(Concern::Pause), 1, "off counts nothing");
}

#[tokio::test(start_paused = true)]
async fn it_drains_what_is_under_way_and_takes_nothing_new() {
    let provider = Fleet::local().provider("p");
    let herd = Herd::new(&provider);
    let handle = herd.handle();
    // The second attempt of a call under way is part of it.
    let service = herd.layer(Script::new([Does::Waits(2000, 503), Does::Waits(1000, 200)]).service());
    let call = tokio::spawn(service.clone().oneshot(costly()));
    sleep(MS(500)).await;
    assert_eq!((handle.drain(S(1)).await, handle.is_draining()), (1, true), "patience ends before the call");
    let error = service.clone().oneshot(costly()).await.unwrap_err();
    assert_eq!(kind(&error), Some(RefusalKind::Draining));
    let drained = tokio::spawn({
        let handle = handle.clone();
        async move { handle.drain(S(30)).await }
    });
    let reply = call.await.unwrap().unwrap();
    assert_eq!(reply.status(), 200);
    sleep(S(1)).await;
    assert!(!drained.is_finished(), "its body is not read yet");
    drop(reply.into_body().collect().await.unwrap());
    assert_eq!(drained.await.unwrap(), 0);
    assert_eq!(herd_of_nobody().drain(S(1)).await, 0);
}

fn herd_of_nobody() -> tower_herd::herd::HerdHandle {
    Herd::new(&Fleet::local().provider("nobody")).handle()
}

#[tokio::test(start_paused = true)]
async fn every_option_changes_what_it_says() {
    let provider = |name: &str| Fleet::local().provider(name);
    let post = || http::Request::post("http://p/").body(Full::from("{}")).unwrap();
    // Safety: an unkeyed POST is sent once, unless the herd says otherwise.
    for (herd, calls) in [(Herd::new(&provider("a")), 1), (Herd::new(&provider("b")).llm(), 2)] {
        let script = Script::new([Does::Answers(500)]);
        drop(herd.layer(script.service()).oneshot(post()).await);
        assert_eq!(script.calls(), calls);
    }
    // What the caller declares, stands.
    let script = Script::new([Does::Answers(500)]);
    let mut request = post();
    request.extensions_mut().insert(Safety::Once);
    drop(Herd::new(&provider("c")).llm().layer(script.service()).oneshot(request).await);
    assert_eq!(script.calls(), 1);
    // Attempts.
    for attempts in [1, 2, 5] {
        let script = Script::new(vec![Does::Answers(503); 9]);
        let herd = Herd::new(&provider("d")).attempts(attempts).retry_budget(tower_herd::retry::Unlimited);
        drop(herd.layer(script.service()).oneshot(costly()).await);
        assert_eq!(script.calls(), attempts as usize);
    }
    // A budget that is empty.
    let script = Script::new([Does::Answers(503)]);
    let empty = RatioBudget::new(0.0).reserve(0, S(10));
    drop(Herd::new(&provider("e")).retry_budget(empty).layer(script.service()).oneshot(costly()).await);
    assert_eq!(script.calls(), 1);
    // A classifier: 404 means that there is nothing; and one by body.
    let script = Script::new([Does::Answers(404)]);
    let failed = |head: tower_herd::Head<'_>| (head.status == 404).then(|| Signal::new(Kind::Failed));
    drop(Herd::new(&provider("f")).classify_head(failed).layer(script.service()).oneshot(costly()).await);
    assert_eq!(script.calls(), 2);
    let script = Script::default();
    let herd = Herd::new(&provider("g")).read_success(100);
    let herd = herd.classify_body(|_, body| (body == b"{}").then(|| Signal::new(Kind::Failed))).attempts(2);
    drop(herd.layer(script.service()).oneshot(costly()).await);
    assert_eq!(script.calls(), 2, "a hollow answer is sent again if the caller calls it a failure");
}

/// A lone client, whose first calls fail, is not kept from its provider by chance.
#[tokio::test(start_paused = true)]
async fn a_quiet_client_is_not_shed() {
    for seed in 0..50 {
        let provider = Fleet::local().seed(seed).provider("quiet");
        let script = Script::new([Does::Throttles(2)]);
        let began = Instant::now();
        let reply = Herd::new(&provider).layer(script.service()).oneshot(costly()).await.unwrap();
        assert_eq!(reply.status(), 200);
        assert!((S(2)..S(4)).contains(&began.elapsed()), "seed {seed}: {:?}", began.elapsed());
    }
}

#[tokio::test(start_paused = true)]
async fn a_configuration_builds_the_same_and_reloads_without_losing_what_is_known() {
    let fleet = Fleet::local();
    let mut config = HerdConfig::new("p");
    config.rungs[0].limits = ProviderSettings::new().ceiling(4);
    let herd = Herd::from_config(&fleet, &config).unwrap();
    let (handle, provider) = (herd.handle(), fleet.provider("p"));
    let script = Script::new([Does::Throttles(40), Does::Hangs]);
    let service = herd.layer(script.service());
    let mut request = costly();
    request.extensions_mut().insert(Task::new(1).deadline_in(S(2)));
    assert_eq!(service.clone().oneshot(request).await.unwrap().status(), 429);
    let paused = provider.paused_until().unwrap();
    config.rungs[0].limits = ProviderSettings::new().ceiling(9);
    config.attempt.headers = S(1);
    config.allowance = 1;
    config.modes.breaker = Mode::Off;
    handle.reload(&config).unwrap();
    assert_eq!((provider.ceiling(), provider.paused_until()), (9, Some(paused)), "the pause stays");
    assert_eq!(handle.mode(Concern::Breaker), Mode::Off);
    // What an operator has switched since stays, unless the file says something new.
    handle.set(Concern::Budget, Mode::Off);
    handle.reload(&config).unwrap();
    assert_eq!((handle.mode(Concern::Budget), handle.mode(Concern::Breaker)), (Mode::Off, Mode::Off));
    let by_hand = Herd::new(&fleet.provider("other")).handle();
    assert!(by_hand.reload(&config).is_err(), "it was not built of a configuration");
    sleep(S(60)).await;
    let began = Instant::now();
    let error = service.clone().oneshot(costly()).await.unwrap_err();
    assert!(error.is::<AttemptTimeout>() && began.elapsed() < S(2), "the new timeout, and one attempt");
    // What services were built of does not change, and then nothing does.
    for (field, change) in [
        ("rungs[0].tier", (|config: &mut HerdConfig| config.rungs[0].tier = 3) as fn(&mut HerdConfig)),
        ("rungs", |config| config.rungs.push(rung("q"))),
        ("retry_budget", |config| config.retry_budget.ratio = 0.2),
        ("rungs[0].settings", |config| config.rungs[0].settings.breaker = Some(BreakerSettings::strict())),
    ] {
        let mut other = config.clone();
        other.allowance = 7;
        change(&mut other);
        let HerdError::Field { field: found, .. } = handle.reload(&other).unwrap_err() else {
            panic!("a field is named")
        };
        assert_eq!(found, field);
    }
}

/// Retries between us and the provider are reported on the short way too.
#[tokio::test(start_paused = true)]
async fn retries_further_in_are_reported() {
    #[derive(Clone, Default)]
    struct Heard(Arc<AtomicUsize>);
    impl tower_herd::observe::Observe for Heard {
        fn observe(&self, event: &tower_herd::observe::Event<'_>) {
            if let tower_herd::observe::Event::InnerRetries { attempts: 3, .. } = event {
                self.0.fetch_add(1, Ordering::Relaxed);
            }
        }
    }
    let heard = Heard::default();
    let provider = Fleet::local().observer(heard.clone()).provider("p");
    let proxy = service_fn(|_: Request| async {
        Ok::<_, Infallible>(
            http::Response::builder()
                .header("x-envoy-attempt-count", 3)
                .body(Full::<Bytes>::default())
                .unwrap(),
        )
    });
    let service = Herd::new(&provider).layer(proxy);
    for _ in 0..100 {
        drop(service.clone().oneshot(costly()).await.unwrap().into_body().collect().await.unwrap());
    }
    assert_eq!(heard.0.load(Ordering::Relaxed), 1, "once a minute");
}

#[test]
fn a_configuration_that_cannot_be_names_its_field() {
    type Change = fn(&mut HerdConfig);
    let cases: [(&str, Change); 14] = [
        ("deadline", |c| c.deadline = Duration::ZERO),
        ("allowance", |c| c.allowance = 0),
        ("attempt.headers", |c| c.attempt.headers = Duration::ZERO),
        ("attempt.idle", |c| c.attempt.idle = Duration::ZERO),
        ("retry_budget.ratio", |c| c.retry_budget.ratio = f64::NAN),
        ("retry_budget.window", |c| c.retry_budget.window = Duration::ZERO),
        ("retry_budget.refill", |c| c.retry_budget.refill = Duration::ZERO),
        ("rungs", |c| c.rungs.clear()),
        ("rungs[0].provider", |c| c.rungs[0].provider.clear()),
        ("rungs[0].weight", |c| c.rungs[0].weight = -1.0),
        ("rungs[0].limits.ceiling", |c| c.rungs[0].limits = ProviderSettings::new().ceiling(0)),
        ("rungs[0].settings.breaker.window", |c| {
            c.rungs[0].settings = RungSettings::new().breaker(BreakerSettings::new().window(0));
        }),
        ("rungs[0].settings.budget.k", |c| {
            c.rungs[0].settings = RungSettings::new().budget(BudgetSettings::new().k(0.1));
        }),
        ("rungs[0].settings.readmission.initial", |c| {
            let profile = tower_herd::readmission::Profile::geometric(2.0, 2.0, S(5));
            c.rungs[0].settings = RungSettings::new().readmission(profile);
        }),
    ];
    for (field, change) in cases {
        let mut config = HerdConfig::new("p");
        change(&mut config);
        match Herd::from_config(&Fleet::local(), &config) {
            Err(HerdError::Field { field: found, why }) => assert_eq!(found, field, "{why}"),
            other => panic!("{field}: {other:?}"),
        }
    }
    let mut two = HerdConfig::new("p");
    two.rungs.push(rung("q"));
    assert!(two.validate().is_ok() && Herd::from_config(&Fleet::local(), &two).is_err());
    two.rungs.push(rung("p"));
    assert!(two.validate().is_err(), "twice");
}

#[cfg(feature = "serde")]
#[test]
fn a_file_is_read_and_its_typing_errors_are_told() {
    let text = r#"{
        "deadline": "1m 30s",
        "default_safety": "costly",
        "retry": { "base": "250ms", "backoff": { "plus-minus": 0.3 } },
        "attempt": { "headers": "45s" },
        "modes": { "breaker": "observe", "budget": "off" },
        "rungs": [{
            "provider": "vendor", "tier": 1, "paid": true,
            "limits": { "ceiling": 20, "tokens_per_minute": 400000, "batch_age": "10s" },
            "settings": { "breaker": { "window": 5, "ratio": 1.0, "open": "5m" },
                          "readmission": { "curve": "slow-start", "window": "1m", "min_weight": 0.1, "aggression": 1.0 } }
        }]
    }"#;
    let config: HerdConfig = serde_json::from_str(text).unwrap();
    assert_eq!((config.deadline, config.attempt.headers), (S(90), S(45)));
    assert_eq!(
        (config.modes.of(Concern::Breaker), config.modes.of(Concern::Budget)),
        (Mode::Observe, Mode::Off)
    );
    assert_eq!(config.rungs[0].settings.breaker.unwrap().open, S(300));
    Herd::from_config(&Fleet::local(), &config).unwrap();
    let back: HerdConfig = serde_json::from_str(&serde_json::to_string(&config).unwrap()).unwrap();
    assert_eq!(back, config);
    for wrong in [r#"{ "deadlin": "1m" }"#, r#"{ "deadline": 60 }"#, r#"{ "modes": { "breker": "off" } }"#] {
        let error = serde_json::from_str::<HerdConfig>(wrong).unwrap_err().to_string();
        assert!(
            error.contains("deadlin") || error.contains("breker") || error.contains("duration"),
            "{error}"
        );
    }
}
