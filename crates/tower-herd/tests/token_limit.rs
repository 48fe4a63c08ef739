//! The tokens of a minute, as callers see them.

mod common;

use common::{Boxed, Request, Script, answer, ms, request, secs, until};
use http_body_util::BodyExt as _;
use std::{
    future::Future,
    sync::{Arc, Mutex},
    task::{Context, Waker},
    time::Duration,
};
use tokio::time::Instant;
use tower::{Layer, Service, ServiceBuilder, ServiceExt, service_fn};
use tower_herd::{
    BoxError, ClassifyLayer, Criticality, Fleet, FleetLimitLayer, HashedFailover, JitteredRetryLayer, Mode,
    Provider, ProviderSettings, Refusal, RefusalKind, RetryAfterLayer, Switch, Task, TokenLimitLayer,
    failover::Rung,
    observe::{Event, Observe},
    retry::Unlimited,
    token_limit::{ByBytes, DeclaredTokens, EstimateTokens, TokenEstimate},
    usage::{Usage, llm},
};

/// One token a second, sixty at once.
fn settings() -> ProviderSettings {
    ProviderSettings::new().ceiling(1000).tokens_per_minute(60)
}

fn provider() -> Provider {
    with(settings())
}

fn with(settings: ProviderSettings) -> Provider {
    Fleet::local().configure("p", settings).unwrap()
}

/// What a request costs stands in its path.
fn cost(request: &Request) -> u64 {
    request.uri().path().trim_start_matches('/').parse().unwrap()
}

fn costs(tokens: u64, task: &Task) -> Request {
    let mut request = request(0);
    *request.uri_mut() = format!("http://p.example/{tokens}").parse().unwrap();
    request.extensions_mut().insert(task.clone());
    request
}

fn task(id: u64) -> Task {
    Task::new(id).deadline_in(secs(600))
}

fn refused<T>(outcome: Result<T, BoxError>) -> Option<(RefusalKind, Option<Duration>)> {
    let error = outcome.err()?;
    let refusal = Refusal::find(&*error).expect("a refusal");
    Some((refusal.kind, refusal.wait()))
}

fn layer(provider: &Provider) -> TokenLimitLayer<fn(&Request) -> u64> {
    TokenLimitLayer::new(provider).estimate(cost as fn(&Request) -> u64)
}

/// In which order tasks came there, and after how many seconds.
fn seen(script: &Script, start: Instant) -> Vec<(u64, u64)> {
    let seen = script.seen.lock().unwrap();
    seen.iter()
        .map(|(at, task, _)| (task.as_ref().unwrap().id().get(), at.duration_since(start).as_secs()))
        .collect()
}

#[tokio::test(start_paused = true)]
async fn in_order_and_a_large_call_is_not_passed_by_small_ones() {
    let (provider, start) = (provider(), Instant::now());
    let script = Script::always(answer(200).after(secs(100)));
    let service = layer(&provider).layer(script.clone());
    let calls: Vec<_> = [60, 30, 1, 1, 20]
        .into_iter()
        .zip(0..)
        .map(|(tokens, id)| tokio::spawn(service.clone().oneshot(costs(tokens, &task(id)))))
        .collect();
    tokio::time::sleep(ms(1)).await;
    assert_eq!((provider.waiting_for_tokens(), provider.in_flight()), (4, 0));
    for call in calls {
        call.await.unwrap().unwrap();
    }
    assert_eq!(seen(&script, start), [(0, 0), (1, 30), (2, 31), (3, 32), (4, 52)]);
}

#[tokio::test(start_paused = true)]
async fn people_first_and_an_old_batch_call_in_turns() {
    let (provider, start) = (with(settings().batch_age(secs(20))), Instant::now());
    let script = Script::always(answer(200));
    let service = layer(&provider).layer(script.clone());
    let batch = |id| task(id).criticality(Criticality::Batch);
    let tasks = [task(0), batch(1), batch(2), task(3), task(4), task(5)];
    let calls: Vec<_> = tasks
        .iter()
        .map(|task| {
            let tokens = if task.id().get() == 0 { 60 } else { 10 };
            tokio::spawn(service.clone().oneshot(costs(tokens, task)))
        })
        .collect();
    for call in calls {
        call.await.unwrap().unwrap();
    }
    assert_eq!(seen(&script, start), [(0, 0), (3, 10), (4, 20), (1, 30), (5, 40), (2, 50)]);
}

#[tokio::test(start_paused = true)]
async fn whose_turn_cannot_come_in_time_is_refused_at_entry_with_the_instant() {
    let (provider, start) = (provider(), Instant::now());
    let script = Script::always(answer(200));
    let service = layer(&provider).layer(script.clone());
    let go = |tokens, deadline| service.clone().oneshot(costs(tokens, &Task::new(1).deadline_in(deadline)));
    go(60, secs(600)).await.unwrap();
    assert_eq!(refused(go(20, secs(19)).await), Some((RefusalKind::Tokens, Some(secs(20)))));
    assert_eq!(start.elapsed(), ms(0));
    // Behind somebody, too.
    let first = tokio::spawn(go(20, secs(600)));
    tokio::time::sleep(ms(1)).await;
    assert_eq!(refused(go(20, secs(39)).await).unwrap().0, RefusalKind::Tokens);
    assert_eq!(refused(go(20, ms(0)).await), Some((RefusalKind::Tokens, Some(ms(39_999)))));
    assert_eq!(provider.waiting_for_tokens(), 1);
    // Where it fits, it waits; until precisely then.
    go(20, secs(40)).await.unwrap();
    assert_eq!(start.elapsed(), secs(40));
    first.await.unwrap().unwrap();
}

#[tokio::test(start_paused = true)]
async fn a_wait_that_grows_is_given_up_when_it_is_known() {
    let provider = provider();
    let script = Script::new(|nth, _| match nth {
        0 => answer(200).after(secs(5)).body(r#"{"usage":{"input_tokens":100,"output_tokens":0}}"#),
        _ => answer(200),
    });
    let service = layer(&provider).layer(script.clone());
    let first = tokio::spawn(service.clone().oneshot(costs(60, &task(0))));
    tokio::time::sleep(ms(1)).await;
    let start = Instant::now();
    let second = tokio::spawn(service.clone().oneshot(costs(10, &Task::new(1).deadline_in(secs(30)))));
    first.await.unwrap().unwrap().into_body().collect().await.unwrap();
    // A hundred were used: the wait of ten seconds is one of fifty now.
    assert_eq!(refused(second.await.unwrap()), Some((RefusalKind::Tokens, Some(secs(45)))));
    assert!(start.elapsed() <= secs(5));
    assert_eq!((script.calls(), provider.waiting_for_tokens()), (1, 0));
}

#[tokio::test(start_paused = true)]
async fn patience_bounds_the_wait() {
    let provider = provider();
    let script = Script::always(answer(200));
    let go = |patience, tokens| {
        layer(&provider).patience(patience).layer(script.clone()).oneshot(costs(tokens, &task(0)))
    };
    go(secs(0), 60).await.unwrap();
    assert_eq!(refused(go(secs(4), 5).await), Some((RefusalKind::Tokens, Some(secs(5)))));
    let start = Instant::now();
    go(secs(5), 5).await.unwrap();
    assert_eq!(start.elapsed(), secs(5));
}

#[tokio::test(start_paused = true)]
async fn who_gives_up_makes_room_at_once() {
    let (provider, start) = (provider(), Instant::now());
    let script = Script::always(answer(200));
    let service = layer(&provider).layer(script.clone());
    service.clone().oneshot(costs(60, &task(0))).await.unwrap();
    let large = tokio::spawn(service.clone().oneshot(costs(60, &task(1))));
    tokio::time::sleep(ms(1)).await;
    let small = tokio::spawn(service.clone().oneshot(costs(10, &task(2))));
    tokio::time::sleep(secs(12)).await;
    assert_eq!(provider.waiting_for_tokens(), 2);
    large.abort();
    small.await.unwrap().unwrap();
    assert_eq!(seen(&script, start), [(0, 0), (2, 12)]);
    assert_eq!(provider.waiting_for_tokens(), 0);
}

/// A waiter whose owner does not poll it keeps its own turn, and nobody else's.
#[tokio::test(start_paused = true)]
async fn who_is_not_polled_is_in_nobodys_way() {
    let (provider, start) = (provider(), Instant::now());
    let script = Script::always(answer(200));
    let service = layer(&provider).layer(script.clone());
    service.clone().oneshot(costs(60, &task(0))).await.unwrap();
    let mut asleep = Box::pin(service.clone().oneshot(costs(10, &task(1))));
    assert!(asleep.as_mut().poll(&mut Context::from_waker(Waker::noop())).is_pending());
    service.clone().oneshot(costs(10, &task(2))).await.unwrap();
    assert_eq!(start.elapsed(), secs(20), "after the other's ten");
    asleep.await.unwrap();
    assert_eq!(start.elapsed(), secs(20), "which it had all the time");
    // Dropped instead, it gives them back.
    let mut asleep = Box::pin(service.clone().oneshot(costs(10, &task(3))));
    assert!(asleep.as_mut().poll(&mut Context::from_waker(Waker::noop())).is_pending());
    tokio::time::sleep(secs(10)).await;
    let next = tokio::spawn(service.clone().oneshot(costs(10, &task(4))));
    tokio::time::sleep(ms(1)).await;
    drop(asleep);
    next.await.unwrap().unwrap();
    assert_eq!(start.elapsed().as_secs(), 30);
}

#[tokio::test(start_paused = true)]
async fn waiting_for_tokens_holds_no_slot() {
    let provider = with(settings().ceiling(1));
    let script = Script::always(answer(200).after(secs(1)));
    let service = ServiceBuilder::new()
        .layer(RetryAfterLayer::new(&provider))
        .layer(layer(&provider))
        .layer(FleetLimitLayer::new(&provider))
        .layer(ClassifyLayer::new(&provider))
        .service(script.clone());
    service.clone().oneshot(costs(50, &task(0))).await.unwrap();
    let large = tokio::spawn(service.clone().oneshot(costs(60, &task(1))));
    tokio::time::sleep(secs(2)).await;
    assert_eq!((provider.in_flight(), provider.waiting_for_tokens()), (0, 1));
    // Nor where a pause has ended, and it came through with a slot in hand.
    provider.pause_for(secs(5));
    let after = tokio::spawn(service.clone().oneshot(costs(1, &task(2))));
    tokio::time::sleep(secs(8)).await;
    assert_eq!((provider.in_flight(), provider.waiting_for_tokens()), (0, 2));
    large.await.unwrap().unwrap();
    after.await.unwrap().unwrap();
    assert_eq!(script.calls(), 3);
}

/// Tokens of a call that waits for a slot, and is given up there, are given back; of one that was sent, not.
#[tokio::test(start_paused = true)]
async fn only_what_was_sent_stays_taken() {
    let provider = with(settings().ceiling(1).aborts(true));
    let script = Script::always(answer(200).after(secs(20)));
    let service = ServiceBuilder::new()
        .layer(layer(&provider).patience(ms(0)))
        .layer(FleetLimitLayer::new(&provider))
        .layer(ClassifyLayer::new(&provider))
        .service(script.clone());
    let first = tokio::spawn(service.clone().oneshot(costs(30, &task(0))));
    tokio::time::sleep(ms(1)).await;
    let second = service.clone().oneshot(costs(30, &task(1)));
    assert!(tokio::time::timeout(secs(1), second).await.is_err());
    assert_eq!(script.calls(), 1);
    let third = tokio::spawn(service.clone().oneshot(costs(30, &task(2))));
    tokio::time::sleep(ms(1)).await;
    assert!(!third.is_finished(), "it has the tokens that the second gave back, and waits for the slot");
    first.abort();
    tokio::time::sleep(ms(1)).await;
    assert_eq!(script.calls(), 2);
    third.abort();
    tokio::time::sleep(ms(1)).await;
    let refusal = refused(service.oneshot(costs(59, &task(3))).await).unwrap();
    assert_eq!(refusal.0, RefusalKind::Tokens, "sixty were sent a moment ago: {refusal:?}");
    assert!(refusal.1.unwrap() > secs(55));
}

#[tokio::test(start_paused = true)]
async fn in_a_ladder_nobody_waits_here_and_the_ladder_comes_back() {
    let fleet = Fleet::local();
    let first = fleet.configure("first", settings()).unwrap();
    let second = fleet.configure("second", settings()).unwrap();
    let (one, two) = (Script::always(answer(200)), Script::always(answer(200)));
    let rung = |provider: &Provider, script: &Script| {
        let layers = ServiceBuilder::new()
            .layer(RetryAfterLayer::new(provider))
            .layer(layer(provider))
            .layer(FleetLimitLayer::new(provider).until_reply())
            .layer(ClassifyLayer::new(provider).replies());
        // Bodies of one type.
        let service = layers.service(script.clone()).map_response(|reply| reply.map(|_| String::new()));
        Rung::new(provider, Boxed::new(service))
    };
    let ladder = HashedFailover::new([rung(&first, &one), rung(&second, &two).tier(1)]).unwrap();
    let start = Instant::now();
    for (id, after) in [(0, 0), (1, 0), (2, 60), (3, 60)] {
        ladder.clone().oneshot(costs(60, &task(id))).await.unwrap();
        assert_eq!(start.elapsed().as_secs(), after, "{id}");
        assert_eq!((first.in_flight(), second.in_flight()), (0, 0));
    }
    let mut rungs = [seen(&one, start).len(), seen(&two, start).len()];
    assert_eq!(rungs, [2, 2]);
    // One that costs less comes through where it can; and who cannot wait is told when.
    ladder.clone().oneshot(costs(1, &task(4))).await.unwrap();
    rungs = [seen(&one, start).len(), seen(&two, start).len()];
    assert_eq!(rungs.iter().sum::<usize>(), 5);
    let hurried = Task::new(5).deadline_in(secs(10));
    let outcome = ladder.oneshot(costs(60, &hurried)).await;
    assert!(refused(outcome).is_some());
}

#[tokio::test(start_paused = true)]
async fn a_retry_layer_waits_for_the_instant_free_of_charge() {
    let provider = provider();
    let script = Script::always(answer(200));
    let service = JitteredRetryLayer::new()
        .budget(Unlimited)
        .layer(layer(&provider).patience(ms(0)).layer(script.clone()));
    let task = Task::new(1).deadline_in(secs(600)).allowance(1);
    let start = Instant::now();
    for _ in 0..2 {
        service.clone().oneshot(costs(60, &task)).await.unwrap();
    }
    assert!((60..=61).contains(&start.elapsed().as_secs()));
    assert_eq!((script.calls(), task.spent()), (2, 0));
}

#[tokio::test(start_paused = true)]
async fn what_was_used_counts_from_the_end_of_the_body() {
    let provider = provider();
    let script = Script::always(answer(200).body(r#"{"usage":{"input_tokens":6,"output_tokens":4}}"#));
    let service = layer(&provider).patience(ms(0)).layer(script.clone());
    let mut held = Vec::new();
    for id in 0..6 {
        held.push(service.clone().oneshot(costs(10, &task(id))).await.unwrap());
    }
    assert!(service.clone().oneshot(costs(1, &task(7))).await.is_err(), "sixty are reserved");
    drop(held);
    assert!(service.clone().oneshot(costs(1, &task(7))).await.is_err(), "and stay: nobody read how many");
    tokio::time::sleep(secs(60)).await;
    // Cached tokens do not count here: six of sixty.
    let uncached = llm(|usage: &Usage| usage.output);
    let service = layer(&provider).patience(ms(0)).meter(uncached).layer(script);
    for id in 0..8 {
        let reply = service.clone().oneshot(costs(30, &task(id))).await;
        assert!(reply.is_ok(), "{id}");
        reply.unwrap().into_body().collect().await.unwrap();
    }
    assert!(service.oneshot(costs(30, &task(9))).await.is_err(), "32 are used");
}

#[derive(Clone, Default)]
struct Heard(Arc<Mutex<Vec<(bool, RefusalKind)>>>);
impl Observe for Heard {
    fn observe(&self, event: &Event<'_>) {
        match event {
            Event::Refused { kind, .. } => self.0.lock().unwrap().push((true, *kind)),
            Event::WouldRefuse { kind, .. } => self.0.lock().unwrap().push((false, *kind)),
            _ => {}
        }
    }
}

#[tokio::test(start_paused = true)]
async fn it_enforces_observes_or_stands_aside() {
    let heard = Heard::default();
    let provider = Fleet::local().observer(heard.clone()).configure("p", settings()).unwrap();
    let switch = Switch::new(Mode::Off);
    let layer = layer(&provider).switch(&switch);
    assert_eq!(layer.handle().mode(), Mode::Off);
    let script = Script::always(answer(200));
    let service = layer.layer(script.clone());
    let go = async |tokens, deadline| {
        let task = Task::new(1).deadline_in(secs(deadline));
        service.clone().oneshot(costs(tokens, &task)).await.is_ok()
    };
    let start = Instant::now();
    for _ in 0..10 {
        assert!(go(60, 600).await && go(99, 600).await);
    }
    switch.set(Mode::Observe);
    assert!(go(60, 600).await, "nothing was counted: the bucket is full");
    assert_eq!(switch.would_refuse(), 0);
    // Too large; too late; and three that would have waited, one behind the other.
    assert!(go(99, 600).await && go(30, 10).await);
    assert!(go(30, 30).await && go(30, 60).await && go(30, 89).await && go(30, 90).await);
    assert_eq!((switch.would_refuse(), start.elapsed()), (6, secs(0)));
    switch.set(Mode::Enforce);
    // 90 s of debt for those that would have been let through.
    assert!(!go(1, 90).await);
    assert!(go(1, 91).await);
    assert_eq!(start.elapsed(), secs(91));
    let heard = heard.0.lock().unwrap().clone();
    let would = (false, RefusalKind::Tokens);
    let large = (false, RefusalKind::TooLarge);
    assert_eq!(heard, [large, would, would, would, would, would, (true, RefusalKind::Tokens)]);
}

#[tokio::test(start_paused = true)]
async fn settings_are_checked_and_change_what_they_say() {
    for (settings, field) in [
        (ProviderSettings::new().tokens_per_minute(0), "tokens_per_minute"),
        (ProviderSettings::new().tokens_per_minute(1).token_burst(0), "token_burst"),
        (ProviderSettings::new().token_burst(1), "token_burst"),
    ] {
        assert_eq!(Fleet::local().configure("p", settings).unwrap_err().field, field);
    }
    let script = Script::always(answer(200));
    let go = async |provider: &Provider, tokens| {
        let service = layer(provider).patience(ms(0)).layer(script.clone());
        refused(service.oneshot(costs(tokens, &task(1))).await)
    };
    // Nothing is limited where nothing is set, until it is.
    let late = Fleet::local().provider("late");
    assert_eq!((go(&late, u64::MAX).await, go(&late, 61).await), (None, None));
    late.configure(settings()).unwrap();
    assert_eq!(go(&late, 61).await, Some((RefusalKind::TooLarge, None)));
    let small = with(settings().token_burst(10));
    assert_eq!(go(&small, 11).await, Some((RefusalKind::TooLarge, None)));
    assert_eq!(
        (go(&small, 10).await, go(&small, 1).await),
        (None, Some((RefusalKind::Tokens, Some(secs(1)))))
    );
    // Scopes share the tokens of their provider, and layers those of theirs.
    let provider = provider();
    assert_eq!(go(&provider.scope("a"), 40).await, None);
    assert_eq!(go(&provider.scope("b"), 21).await, Some((RefusalKind::Tokens, Some(secs(1)))));
    // The line is bounded.
    let short = with(settings().queue(1));
    let service = layer(&short).layer(script.clone());
    service.clone().oneshot(costs(60, &task(1))).await.unwrap();
    let waits = tokio::spawn(service.clone().oneshot(costs(1, &task(2))));
    tokio::time::sleep(ms(1)).await;
    assert_eq!(refused(service.oneshot(costs(1, &task(3))).await).unwrap().0, RefusalKind::Tokens);
    waits.await.unwrap().unwrap();
}

#[test]
fn estimates() {
    let request = |bytes: usize| http::Request::new("x".repeat(bytes));
    assert_eq!(ByBytes::default().tokens(&request(3500)), TokenEstimate::Guess(2024));
    assert_eq!(ByBytes::output(0).tokens(&request(1)), TokenEstimate::Guess(1));
    assert_eq!(ByBytes::output(7).tokens(&request(0)), TokenEstimate::Guess(7));
    assert_eq!(ByBytes::output(u64::MAX).guess(u64::MAX), u64::MAX);
    let mut declared = request(3500);
    declared.extensions_mut().insert(DeclaredTokens(5));
    assert_eq!(ByBytes::default().tokens(&declared), TokenEstimate::Declared(5));
    assert_eq!(TokenEstimate::from(5), TokenEstimate::Declared(5));
}

/// A service that gets ready only after a while: the tokens are taken when the turn comes, and given back when
/// the deadline comes first.
#[tokio::test(start_paused = true)]
async fn a_service_that_does_not_get_ready() {
    #[derive(Clone)]
    struct Never(bool);
    impl Service<Request> for Never {
        type Response = common::Response;
        type Error = BoxError;
        type Future = std::future::Ready<Result<common::Response, BoxError>>;
        fn poll_ready(&mut self, _: &mut Context<'_>) -> std::task::Poll<Result<(), BoxError>> {
            // Its first instance is ready, its clones are not.
            if std::mem::replace(&mut self.0, false) {
                std::task::Poll::Ready(Ok(()))
            } else {
                std::task::Poll::Pending
            }
        }
        fn call(&mut self, _: Request) -> Self::Future {
            std::future::ready(Ok(http::Response::new(String::new())))
        }
    }
    let provider = provider();
    let mut service = layer(&provider).layer(Never(true));
    let other = layer(&provider).layer(Script::always(answer(200)));
    other.clone().oneshot(costs(60, &task(0))).await.unwrap();
    let start = Instant::now();
    let call = service.ready().await.unwrap().call(costs(30, &Task::new(1).deadline_in(secs(40))));
    let outcome = call.await;
    assert_eq!((refused(outcome).unwrap().0, start.elapsed()), (RefusalKind::Deadline, secs(40)));
    other.oneshot(costs(40, &task(2))).await.unwrap();
    assert_eq!(start.elapsed(), secs(40), "its thirty are there for others");
}

/// Thousands that come, wait, give up and are served at random: nobody is left over, nothing is lost, and never
/// more is sent than may be.
#[tokio::test(start_paused = true)]
async fn nobody_is_left_over() {
    for seed in 0..3 {
        let mut random = fastrand_like(seed);
        let provider = with(
            ProviderSettings::new().ceiling(1000).tokens_per_minute(6000).token_burst(300).queue(100_000),
        );
        let sent = Arc::new(Mutex::new(Vec::new()));
        let log = sent.clone();
        let inner = service_fn(move |request: Request| {
            log.lock().unwrap().push((Instant::now(), cost(&request)));
            async { Ok::<_, BoxError>(http::Response::new(String::new())) }
        });
        let service = layer(&provider).layer(inner);
        let mut calls = Vec::new();
        for id in 0..1000 {
            let class = if random(3) == 0 { Criticality::Batch } else { Criticality::Interactive };
            let task = Task::new(id).deadline_in(secs(3600)).criticality(class);
            let call = service.clone().oneshot(costs(random(100), &task));
            let patience = if random(4) == 0 { ms(random(20_000)) } else { secs(7200) };
            calls.push(tokio::spawn(tokio::time::timeout(patience, call)));
            if random(3) == 0 {
                tokio::time::sleep(ms(random(200))).await;
            }
        }
        for call in calls {
            if let Ok(outcome) = call.await.unwrap() {
                outcome.unwrap();
            }
        }
        assert_eq!(provider.waiting_for_tokens(), 0, "seed {seed}");
        let sent = sent.lock().unwrap().clone();
        for (i, (from, _)) in sent.iter().enumerate() {
            let mut used = 0;
            for (to, tokens) in &sent[i..] {
                used += u128::from(*tokens);
                // A hundred a second.
                assert!(
                    used * 10_000_000 <= to.duration_since(*from).as_nanos() + 300 * 10_000_000,
                    "seed {seed}"
                );
            }
        }
        // All that is left is a full bucket.
        tokio::time::sleep(secs(3)).await;
        let all = layer(&provider).patience(ms(0)).layer(Script::always(answer(200)));
        all.oneshot(costs(300, &task(0))).await.unwrap();
    }
}

/// A small generator (SplitMix64): the numbers below `n`, by its seed.
fn fastrand_like(mut state: u64) -> impl FnMut(u64) -> u64 {
    move |n| {
        state = state.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = state;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        (z ^ (z >> 31)) % n
    }
}

#[tokio::test(start_paused = true)]
async fn who_names_no_deadline_waits_a_minute_at_most() {
    let provider = provider();
    let service = layer(&provider).layer(Script::always(answer(200)));
    let mut without = until(1, secs(1));
    *without.uri_mut() = "http://p.example/60".parse().unwrap();
    without.extensions_mut().clear();
    let again = |request: &Request| {
        let mut copy = http::Request::new(String::new());
        *copy.uri_mut() = request.uri().clone();
        copy
    };
    service.clone().oneshot(again(&without)).await.unwrap();
    service.clone().oneshot(again(&without)).await.unwrap();
    let waits = tokio::spawn(service.clone().oneshot(costs(1, &task(1))));
    tokio::time::sleep(ms(1)).await;
    assert_eq!(refused(service.oneshot(again(&without)).await).unwrap().0, RefusalKind::Tokens);
    waits.await.unwrap().unwrap();
}
