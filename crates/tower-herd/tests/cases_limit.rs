//! Public reports about slots that were lost, shared wrongly or cut to nothing: what our limit does
//! there, in one process.

mod common;

use bytes::Bytes;
use common::{Boxed, Request, Response, Script, answer, ms, request, retrying, rung, secs, until};
use http_body_util::{BodyExt as _, StreamBody};
use std::{
    future::Future,
    pin::Pin,
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicUsize, Ordering},
    },
    task::{Context, Poll},
    time::Duration,
};
use tokio::time::Instant;
use tower::{Layer, Service, ServiceExt, service_fn};
use tower_herd::{
    AttemptTimeoutLayer, BoxError, Criticality, Fleet, FleetLimitLayer, HashedFailover, JitteredRetryLayer,
    Provider, ProviderSettings, Refusal, RefusalKind, Task, TaskLayer, failover::Rung,
};

fn provider(ceiling: u32) -> Provider {
    Fleet::local().configure("p", ProviderSettings::new().ceiling(ceiling).aborts(true)).unwrap()
}

fn status(outcome: Result<Response, BoxError>) -> u16 {
    outcome.map_or(0, |reply| reply.status().as_u16())
}

/// All slots can be had at once, and no more: nothing was lost, and nothing given back twice.
async fn whole(provider: &Provider, report: &str) {
    tokio::time::sleep(secs(40)).await;
    provider.clear_pause();
    tokio::time::sleep(secs(40)).await;
    assert_eq!((provider.in_flight(), provider.waiting()), (0, 0), "{report}");
    let ceiling = provider.ceiling();
    let script = Script::always(answer(200).after(secs(2)));
    let service = FleetLimitLayer::new(provider).layer(script.clone());
    let calls: Vec<_> =
        (0..u64::from(3 * ceiling)).map(|i| tokio::spawn(service.clone().oneshot(request(i)))).collect();
    for call in calls {
        drop(call.await.unwrap().unwrap());
    }
    // It may have grown meanwhile.
    let peak = script.peak.load(Ordering::SeqCst);
    assert!((ceiling as usize..=provider.ceiling() as usize).contains(&peak), "{report}: {peak}");
    assert_eq!((provider.in_flight(), provider.waiting()), (0, 0), "{report}");
}

/// Polls its future so many times, and then drops it.
struct Polled<F>(Pin<Box<F>>, usize);
impl<F: Future> Future for Polled<F> {
    type Output = Option<F::Output>;
    fn poll(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Self::Output> {
        if self.1 == 0 {
            return Poll::Ready(None);
        }
        self.1 -= 1;
        match self.0.as_mut().poll(cx) {
            Poll::Ready(output) => Poll::Ready(Some(output)),
            Poll::Pending if self.1 == 0 => Poll::Ready(None),
            Poll::Pending => Poll::Pending,
        }
    }
}

/// Not ready at first, so that to get ready is an await point too; then answers in two steps.
#[derive(Clone)]
struct Slow(Script, bool);
impl Service<Request> for Slow {
    type Response = Response;
    type Error = BoxError;
    type Future = Pin<Box<dyn Future<Output = Result<Response, BoxError>> + Send>>;
    fn poll_ready(&mut self, cx: &mut Context<'_>) -> Poll<Result<(), BoxError>> {
        if std::mem::replace(&mut self.1, true) {
            return Poll::Ready(Ok(()));
        }
        cx.waker().wake_by_ref();
        Poll::Pending
    }
    fn call(&mut self, request: Request) -> Self::Future {
        self.1 = false;
        let call = self.0.call(request);
        Box::pin(async move {
            tokio::task::yield_now().await;
            Ok(call.await?)
        })
    }
}

fn ladder(provider: &Provider, inner: Slow) -> Boxed {
    let rungs = [Rung::new(provider, rung(provider, inner))];
    let ladder = HashedFailover::new(rungs).unwrap();
    Boxed::new(TaskLayer::new().layer(retrying(Boxed::new(ladder))))
}

// BerriAI/litellm#20256, #28160, #30020, #1477, #27955: a slot stayed taken after a timeout, a
// cancelled call, a request at fault, an error, and for ever.
#[tokio::test(start_paused = true)]
async fn litellm_20256_28160_30020_1477_27955_dropped_at_each_await_point() {
    for (what, script) in [
        ("served", Script::always(answer(200).after(ms(20)))),
        ("at fault", Script::always(answer(400).after(ms(20)))),
        (
            "throttled, then served",
            Script::new(
                |nth, _| if nth % 2 == 0 { answer(429).header("retry-after", 2) } else { answer(200) },
            ),
        ),
        ("failing", Script::always(answer(500).after(ms(20)))),
    ] {
        for gates in ["gates", "ladder"] {
            let provider = provider(2);
            let slow = Slow(script.clone(), false);
            let service = match gates {
                "gates" => retrying(rung(&provider, slow)),
                _ => ladder(&provider, slow),
            };
            for polls in 0..25 {
                // Four at once: some have a slot, some wait, one is woken when it is dropped.
                let calls: Vec<_> = (0..4)
                    .map(|i| {
                        let call = Box::pin(service.clone().oneshot(until(i, secs(20))));
                        tokio::spawn(Polled(call, polls + i as usize))
                    })
                    .collect();
                for call in calls {
                    call.await.unwrap();
                }
                let held =
                    (provider.in_flight(), provider.waiting(), script.in_flight.load(Ordering::SeqCst));
                assert_eq!(held, (0, 0, 0), "{what}, {gates}, dropped after {polls} polls");
            }
            whole(&provider, what).await;
        }
    }
}

#[tokio::test(start_paused = true)]
async fn litellm_20256_each_way_in_which_a_call_can_end() {
    let broken = |what: &'static str| {
        service_fn(move |_: Request| async move {
            match what {
                "an error" => return Err(std::io::Error::other("reset")),
                "a panic" => panic!("on purpose"),
                "a timeout" => tokio::time::sleep(secs(3600)).await,
                // A layer between the limit and the client that answers by itself.
                "answered from a cache" => return Ok(Response::new("cached".into())),
                _ => {}
            }
            Ok(Response::new(String::new()))
        })
    };
    for what in ["an error", "a panic", "a timeout", "answered from a cache", "served"] {
        let provider = provider(3);
        let inner = AttemptTimeoutLayer::default().layer(broken(what));
        let service = FleetLimitLayer::new(&provider).layer(inner);
        for i in 0..30 {
            let call = service.clone().oneshot(until(i, secs(2)));
            match tokio::spawn(call).await {
                Ok(Ok(reply)) => drop(reply),
                Ok(Err(error)) => assert!(Refusal::find(&*error).is_none(), "{what}: {error}"),
                Err(error) => assert!(error.is_panic()),
            }
        }
        whole(&provider, what).await;
    }
}

// BerriAI/litellm#17323, e2b-dev/E2B#1666: a slot that came back for one kind of reply and not for another,
// or at the head while the stream still ran.
#[tokio::test(start_paused = true)]
async fn litellm_17323_streams_and_plain_bodies_give_their_slot_back_at_their_end() {
    for chunks in [0, 1, 5] {
        let provider = provider(1);
        let inner = service_fn(move |_: Request| async move {
            let frames = futures_util::stream::unfold(0, move |nth| async move {
                tokio::time::sleep(secs(1)).await;
                (nth < chunks).then(|| (Ok::<_, BoxError>(http_body::Frame::data(Bytes::from("x"))), nth + 1))
            });
            Ok::<_, BoxError>(http::Response::new(StreamBody::new(frames)))
        });
        let service = FleetLimitLayer::new(&provider).layer(inner);
        for drop_after in [None, Some(0), Some(1)] {
            let reply = service.clone().oneshot(request(1)).await.unwrap();
            assert_eq!(provider.in_flight(), 1, "the stream runs");
            let mut body = Box::pin(reply.into_body());
            match drop_after {
                None => {
                    while body.as_mut().frame().await.is_some() {
                        assert_eq!(provider.in_flight(), 1);
                    }
                }
                Some(frames) => {
                    for _ in 0..frames {
                        body.frame().await;
                    }
                }
            }
            drop(body);
            assert_eq!(provider.in_flight(), 0, "{chunks} chunks, dropped after {drop_after:?}");
        }
    }
}

// BerriAI/litellm#40291, #27736, crewAIInc/crewAI#2906: each of three instances counted for itself, so
// the limit was three times what was meant. (Processes are the business of the store.)
#[tokio::test(start_paused = true)]
async fn litellm_40291_three_instances_share_one_limit() {
    let script = Script::always(answer(200).after(ms(100)));
    let fleet = Fleet::local();
    let mut calls = vec![];
    for _ in 0..3 {
        let settings = ProviderSettings::new().ceiling(10).aborts(true);
        let instance = FleetLimitLayer::new(&fleet.configure("p", settings).unwrap()).layer(script.clone());
        for i in 0..40 {
            calls.push(tokio::spawn(instance.clone().oneshot(request(i))));
        }
    }
    for call in calls {
        drop(call.await.unwrap().unwrap());
    }
    assert_eq!((script.peak.load(Ordering::SeqCst), script.calls()), (10, 120));
}

// vectordotdev/vector#26123, #2703: the time of the whole sequence, its sleeps included, was taken for
// the latency of a call.
#[tokio::test(start_paused = true)]
async fn vector_26123_the_sleep_between_attempts_is_not_latency() {
    let provider = provider(1);
    let script =
        Script::new(
            |nth, _| if nth % 2 == 0 { answer(500).after(ms(100)) } else { answer(200).after(ms(100)) },
        );
    let layer = JitteredRetryLayer::new().budget(tower_herd::retry::Unlimited).seed(1).base(secs(20));
    let service = layer.layer(rung(&provider, script.clone()));
    let mut slept = Duration::ZERO;
    for i in 0..20 {
        let start = Instant::now();
        assert_eq!(status(service.clone().oneshot(request(i)).await), 200);
        slept += start.elapsed();
    }
    assert!(slept > secs(100), "{slept:?}");
    // What the provider takes a call to last shows in the instant of a refusal.
    let running = tokio::spawn(rung(&provider, script).oneshot(request(98)));
    tokio::task::yield_now().await;
    let now = Instant::now();
    let impatient = FleetLimitLayer::new(&provider).patience(Duration::ZERO);
    let error = impatient.layer(Script::always(answer(200))).oneshot(request(99)).await.unwrap_err();
    let refusal = Refusal::find(&*error).unwrap();
    assert_eq!(refusal.kind, RefusalKind::NoSlot);
    let told = refusal.retry_at.unwrap() - now;
    assert!((ms(50)..=ms(250)).contains(&told), "{told:?}");
    running.await.unwrap().unwrap();
}

// PrefectHQ/prefect#20251: a slot was held, or lost, while a run waited for its retry.
#[tokio::test(start_paused = true)]
async fn prefect_20251_no_slot_is_held_between_attempts() {
    for reply in
        [answer(429).header("retry-after-ms", 300), answer(500), answer(503).header("retry-after", 1)]
    {
        let provider = provider(1);
        let script = Script::new(move |nth, _| if nth == 0 { reply.clone() } else { answer(200) });
        let service = retrying(rung(&provider, script.clone()));
        let call = tokio::spawn(service.oneshot(request(1)));
        tokio::time::sleep(ms(1)).await;
        assert_eq!((script.calls(), provider.in_flight(), provider.waiting()), (1, 0, 0));
        assert_eq!(status(call.await.unwrap()), 200);
    }
}

// resilience4j/resilience4j#1177: a hundred 429s halved the limit a hundred times. matsonj/eval-connections#14,
// llm-d-batch-gateway#394, gardener/cc-utils#1704: a fixed number of calls met 429s and never became less.
#[tokio::test(start_paused = true)]
async fn resilience4j_1177_a_hundred_429s_at_once_are_one_cut() {
    let fleet = Fleet::local();
    let set = |name: &str| fleet.configure(name, ProviderSettings::new().ceiling(120).aborts(true)).unwrap();
    let (here, there) = (set("here"), set("there"));
    // 20 are served, 100 refused.
    let busy = Arc::new(AtomicUsize::new(0));
    let script = {
        let busy = busy.clone();
        service_fn(move |_: Request| {
            let busy = busy.clone();
            async move {
                let refused = busy.fetch_add(1, Ordering::SeqCst) >= 20;
                tokio::time::sleep(if refused { ms(5) } else { secs(3) }).await;
                busy.fetch_sub(1, Ordering::SeqCst);
                let mut reply = Response::new(String::new());
                if refused {
                    *reply.status_mut() = http::StatusCode::TOO_MANY_REQUESTS;
                }
                Ok::<_, BoxError>(reply)
            }
        })
    };
    // All 120 get their slot before the first refusal comes.
    let calls: Vec<_> = (0..120)
        .map(|i| tokio::spawn(FleetLimitLayer::new(&here).layer(script.clone()).oneshot(request(i))))
        .collect();
    let mut refused = 0;
    for call in calls {
        refused += u32::from(status(call.await.unwrap().map(|reply| reply.map(|_| String::new()))) == 429);
    }
    assert!(refused > 0 && u64::from(refused) == here.throttled());
    assert!(
        (16..=24).contains(&here.ceiling()),
        "what was served, and not a 2^-{refused}th: {}",
        here.ceiling()
    );
    assert_eq!((there.ceiling(), there.paused_until()), (120, None), "that provider only");
}

// Overload cuts by a part of what was in flight: there a hundred cuts would indeed leave nothing.
#[tokio::test(start_paused = true)]
async fn resilience4j_1177_a_hundred_replies_of_overload_at_once_are_one_cut() {
    let provider = provider(100);
    let script = Script::new(|nth, _| answer(if nth < 100 { 529 } else { 200 }).after(secs(5)));
    let service = FleetLimitLayer::new(&provider).layer(script.clone());
    let calls: Vec<_> = (0..100).map(|i| tokio::spawn(service.clone().oneshot(request(i)))).collect();
    for call in calls {
        drop(call.await.unwrap().unwrap());
    }
    assert_eq!((script.peak.load(Ordering::SeqCst), provider.ceiling()), (100, 75));
}

#[tokio::test(start_paused = true)]
async fn resilience4j_1177_however_long_it_says_429_one_slot_is_left_and_the_others_come_back() {
    let provider = Fleet::local().configure("p", ProviderSettings::new().ceiling(50).aborts(true)).unwrap();
    let sick = Arc::new(AtomicBool::new(true));
    let script = {
        let sick = sick.clone();
        Script::new(move |_, _| match sick.load(Ordering::SeqCst) {
            true => answer(429).header("retry-after", 1).after(ms(5)),
            false => answer(200).after(ms(50)),
        })
    };
    let service = rung(&provider, script.clone());
    for round in 0..50 {
        let calls: Vec<_> =
            (0..100).map(|i| tokio::spawn(service.clone().oneshot(until(i, secs(5))))).collect();
        for call in calls {
            drop(call.await.unwrap());
        }
        assert!(provider.ceiling() >= 1, "round {round}");
    }
    sick.store(false, Ordering::SeqCst);
    let calls: Vec<_> =
        (0..2000).map(|i| tokio::spawn(service.clone().oneshot(until(i, secs(600))))).collect();
    let start = Instant::now();
    for call in calls {
        assert_eq!(status(call.await.unwrap()), 200);
    }
    // One slot would take 100 s.
    assert!(start.elapsed() < secs(60), "{:?}", start.elapsed());
}

// BerriAI/litellm#31830, #18128, mostlygeek/llama-swap#811: batch work starved people, or people it.
#[tokio::test(start_paused = true)]
async fn litellm_18128_people_first_and_batch_in_the_end() {
    let provider = provider(1);
    let script = Script::always(answer(200).after(ms(100)));
    let service = rung(&provider, script.clone());
    let ask = |id: u64, class| {
        let mut request = request(id);
        request.extensions_mut().insert(Task::new(id).deadline_in(secs(600)).criticality(class));
        service.clone().oneshot(request)
    };
    drop(ask(0, Criticality::Batch).await.unwrap());
    let start = Instant::now();
    let held = tokio::spawn(ask(1, Criticality::Interactive));
    tokio::task::yield_now().await;
    let low: Vec<_> = (100..110).map(|i| tokio::spawn(ask(i, Criticality::Batch))).collect();
    tokio::task::yield_now().await;
    // People keep coming, as fast as they are served, for longer than anybody may be made to wait.
    let people: Vec<_> = (1000..1300).map(|i| tokio::spawn(ask(i, Criticality::Interactive))).collect();
    drop(held.await.unwrap());
    for call in low.into_iter().chain(people) {
        drop(call.await.unwrap().unwrap());
    }
    let seen = script.seen.lock().unwrap();
    let came = |id: u64| {
        let call = seen.iter().find(|call| call.1.as_ref().unwrap().id().get() == id).unwrap();
        call.0 - start
    };
    assert!(came(1000) < ms(250), "people first: {:?}", came(1000));
    assert!(came(100) > secs(4) && came(100) < secs(8), "and then batch: {:?}", came(100));
    assert!(came(109) < came(1299), "it is not put off to the end");
}

/// Counts how often its future is polled.
struct Counted<F>(Pin<Box<F>>, Arc<AtomicUsize>);
impl<F: Future> Future for Counted<F> {
    type Output = F::Output;
    fn poll(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<F::Output> {
        self.1.fetch_add(1, Ordering::Relaxed);
        self.0.as_mut().poll(cx)
    }
}

// sidekiq/sidekiq#2944: each release woke all who waited.
#[tokio::test(start_paused = true)]
async fn sidekiq_2944_a_release_wakes_one() {
    const N: usize = 1000;
    let provider = provider(1);
    let service = FleetLimitLayer::new(&provider).layer(Script::always(answer(200).after(ms(10))));
    let polls = Arc::new(AtomicUsize::new(0));
    let calls: Vec<_> = (0..N as u64)
        .map(|i| tokio::spawn(Counted(Box::pin(service.clone().oneshot(request(i))), polls.clone())))
        .collect();
    for call in calls {
        drop(call.await.unwrap().unwrap());
    }
    // Enter, be granted, be served; all woken each time would be half a million.
    assert!(polls.load(Ordering::Relaxed) <= 5 * N, "{} polls", polls.load(Ordering::Relaxed));
}

// redisson/redisson#7264: an error path lost a place of the library's own limit for ever. Ours are the
// queue and the sleepers of the retry layer (and the probe: see the cases of the pause).
#[tokio::test(start_paused = true)]
async fn redisson_7264_places_in_the_queue_and_among_the_sleepers_come_back() {
    let settings = ProviderSettings::new().ceiling(1).queue(3).aborts(true);
    let provider = Fleet::local().configure("p", settings).unwrap();
    let service = FleetLimitLayer::new(&provider).layer(Script::always(answer(200).after(secs(100))));
    let running = tokio::spawn(service.clone().oneshot(request(0)));
    tokio::task::yield_now().await;
    for round in 0..20 {
        let waiting: Vec<_> =
            (0..3).map(|i| tokio::spawn(service.clone().oneshot(until(i, secs(5000))))).collect();
        tokio::task::yield_now().await;
        assert_eq!(provider.waiting(), 3, "round {round}");
        let error = service.clone().oneshot(until(9, secs(5000))).await.unwrap_err();
        assert_eq!(Refusal::find(&*error).unwrap().why, "its queue is full");
        waiting.iter().for_each(tokio::task::JoinHandle::abort);
        for waiter in waiting {
            assert!(waiter.await.unwrap_err().is_cancelled());
        }
        assert_eq!(provider.waiting(), 0);
    }
    running.abort();
    let layer = JitteredRetryLayer::new().budget(tower_herd::retry::Unlimited).max_sleepers(2);
    let throttled = Script::always(answer(429).header("retry-after", 50));
    for _ in 0..20 {
        let asleep: Vec<_> =
            (0..2).map(|i| tokio::spawn(layer.layer(throttled.clone()).oneshot(request(i)))).collect();
        tokio::task::yield_now().await;
        assert_eq!(layer.sleeping(), 2);
        asleep.iter().for_each(tokio::task::JoinHandle::abort);
        for sleeper in asleep {
            assert!(sleeper.await.unwrap_err().is_cancelled());
        }
        assert_eq!(layer.sleeping(), 0);
    }
}

// brandur/redis-cell#50: a large rate over a short time limited nothing, by a division that came to 0.
#[tokio::test(start_paused = true)]
async fn redis_cell_50_large_rates_and_tiny_intervals_are_kept() {
    for (a_minute, calls) in [(60_000, 9000), (1_000_000, 50_000), (60, 30)] {
        let settings = ProviderSettings::new().ceiling(100_000).requests_per_minute(a_minute).queue(100_000);
        let provider = Fleet::local().configure("p", settings.aborts(true)).unwrap();
        let script = Script::always(answer(200));
        let service = FleetLimitLayer::new(&provider).layer(script.clone());
        let start = Instant::now();
        let all: Vec<_> = (0..calls).map(|i| tokio::spawn(service.clone().oneshot(request(i)))).collect();
        for call in all {
            drop(call.await.unwrap().unwrap());
        }
        let fair = 60.0 * calls as f64 / f64::from(a_minute);
        let took = start.elapsed().as_secs_f64();
        // A second's worth may go in one burst.
        assert!(took >= fair - 1.05, "{calls} at {a_minute} a minute in {took} s, and not {fair}");
        assert!(took <= 1.2 * fair + 0.1, "{calls} at {a_minute} a minute in {took} s, and not {fair}");
    }
}

// Netflix/concurrency-limits#140, #81: a permit was kept when something further in failed before the
// call was made. (Races between look and act are the loom models' business.)
#[tokio::test(start_paused = true)]
async fn concurrency_limits_140_81_an_error_before_the_inner_call_gives_the_slot_back() {
    #[derive(Clone)]
    struct Unready(Arc<AtomicBool>);
    impl Service<Request> for Unready {
        type Response = Response;
        type Error = BoxError;
        type Future = std::future::Ready<Result<Response, BoxError>>;
        fn poll_ready(&mut self, _: &mut Context<'_>) -> Poll<Result<(), BoxError>> {
            Poll::Ready(if self.0.load(Ordering::SeqCst) { Err("no connection".into()) } else { Ok(()) })
        }
        fn call(&mut self, _: Request) -> Self::Future {
            std::future::ready(Err("a layer between says no".into()))
        }
    }
    let provider = provider(1);
    let broken = Arc::new(AtomicBool::new(false));
    let service = FleetLimitLayer::new(&provider).layer(Unready(broken.clone()));
    service.clone().oneshot(request(0)).await.unwrap_err();
    assert_eq!(provider.in_flight(), 0);
    // Those who wait get their slot, and then their service is not ready any more.
    let held = FleetLimitLayer::new(&provider).layer(Script::always(answer(200).after(secs(1))));
    let held = tokio::spawn(held.oneshot(request(1)));
    tokio::task::yield_now().await;
    let waiting: Vec<_> = (2..6).map(|i| tokio::spawn(service.clone().oneshot(request(i)))).collect();
    tokio::task::yield_now().await;
    assert_eq!(provider.waiting(), 4);
    broken.store(true, Ordering::SeqCst);
    drop(held.await.unwrap().unwrap());
    for waiter in waiting {
        let error = waiter.await.unwrap().unwrap_err();
        assert_eq!(error.to_string(), "no connection");
    }
    whole(&provider, "not ready").await;
}

// embassy-rs/embassy#6964, awslabs/shuttle#167: the one who waits first gives up, just when it is
// called, and nobody else is woken.
#[tokio::test(start_paused = true)]
async fn embassy_6964_shuttle_167_a_head_that_gives_up_passes_the_slot_on() {
    for give_up_after in [ms(999), ms(1000), ms(1001)] {
        let provider = provider(1);
        let script = Script::always(answer(200).after(secs(1)));
        let service = FleetLimitLayer::new(&provider).layer(script.clone());
        let start = Instant::now();
        let first = tokio::spawn(service.clone().oneshot(request(0)));
        tokio::task::yield_now().await;
        let heads: Vec<_> = (1..4)
            .map(|i| tokio::spawn(tokio::time::timeout(give_up_after, service.clone().oneshot(request(i)))))
            .collect();
        tokio::task::yield_now().await;
        let last = tokio::spawn(service.clone().oneshot(request(9)));
        drop(first.await.unwrap().unwrap());
        for head in heads {
            drop(head.await.unwrap());
        }
        drop(last.await.unwrap().unwrap());
        let done = start.elapsed();
        assert!(done <= ms(3100), "{give_up_after:?}: {done:?}");
        assert_eq!((provider.in_flight(), provider.waiting()), (0, 0));
    }
}

// smol-rs/async-lock#23: one who had been woken found the lock taken by a newcomer, again and again.
#[tokio::test(start_paused = true)]
async fn async_lock_23_newcomers_do_not_pass_who_was_woken() {
    let provider = provider(1);
    let script = Script::always(answer(200).after(ms(1)));
    let service = FleetLimitLayer::new(&provider).layer(script.clone());
    // Eight of them call again the moment they are served, without ever yielding the slot to the runtime.
    let stop = Arc::new(AtomicBool::new(false));
    let greedy: Vec<_> = (0..8)
        .map(|i| {
            let (service, stop) = (service.clone(), stop.clone());
            tokio::spawn(async move {
                while !stop.load(Ordering::SeqCst) {
                    let mut request = request(i);
                    request.extensions_mut().insert(Task::new(i).deadline_in(secs(600)).caller(i));
                    drop(service.clone().oneshot(request).await.unwrap());
                }
            })
        })
        .collect();
    tokio::time::sleep(ms(100)).await;
    for nth in 0..50 {
        let before = script.calls();
        let mut modest = request(100);
        modest.extensions_mut().insert(Task::new(100).deadline_in(secs(600)).caller(100));
        drop(service.clone().oneshot(modest).await.unwrap());
        let passed = script.calls() - before;
        assert!(passed <= 2 * 8 + 2, "round {nth}: {passed} went before it");
    }
    stop.store(true, Ordering::SeqCst);
    for one in greedy {
        one.await.unwrap();
    }
}

// joshrotenberg/tower-resilience#365, #286: to be ready took a slot that was lost on drop, or took none and let
// all the clones through. linkerd/linkerd2-proxy#751: to be ready held it, long before a request came.
#[tokio::test(start_paused = true)]
async fn tower_resilience_365_286_clones_and_readiness_take_nothing_and_pass_nothing() {
    let provider = provider(4);
    let script = Script::always(answer(200).after(ms(50)));
    let service = FleetLimitLayer::new(&provider).layer(script.clone());
    let mut ready = vec![];
    for _ in 0..200 {
        let mut clone = service.clone();
        clone.ready().await.unwrap();
        ready.push(clone);
    }
    assert_eq!(provider.in_flight(), 0, "readiness holds no slot");
    ready.truncate(100);
    let calls: Vec<_> =
        ready.iter_mut().enumerate().map(|(i, clone)| clone.call(request(i as u64))).collect();
    drop(ready);
    for reply in futures_util::future::join_all(calls).await {
        drop(reply.unwrap());
    }
    assert_eq!(script.peak.load(Ordering::SeqCst), 4);
    whole(&provider, "clones").await;
    // A call that was made and is never polled holds no slot for ever.
    for i in 0..10 {
        let call = Polled(Box::pin(service.clone().oneshot(request(i))), 1);
        assert!(call.await.is_none());
    }
    whole(&provider, "never polled").await;
}
