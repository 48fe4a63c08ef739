//! Public reports about money and tokens that were counted too late, twice, by everybody for himself, or not at
//! all: what our spend cap and our limit on tokens do there.

mod common;

use bytes::Bytes;
use common::{Request, Script, answer, ms, request, secs};
use futures_util::FutureExt as _;
use http_body_util::{BodyExt as _, StreamBody};
use std::{
    convert::Infallible,
    error::Error,
    sync::{
        Arc,
        atomic::{AtomicU64, AtomicUsize, Ordering},
    },
};
use tokio::time::Instant;
use tower::{Layer, Service, ServiceBuilder, ServiceExt, service_fn};
use tower_herd::{
    AttemptTimeoutLayer, BoxError, ClassifyLayer, Fleet, FleetLimitLayer, HashedFailover, JitteredRetryLayer,
    Kind, Provider, ProviderSettings, Refusal, RefusalKind, RetryAfterLayer, Signal, SpendLayer, Task,
    TokenLimitLayer, classify_fn,
    failover::Rung,
    retry::Unlimited,
    spend::{Allowance, Amount, Prices},
    token_limit::{DeclaredTokens, TokenEstimate},
    usage::{OfBody, Usage, llm, of_reply},
};

fn amount(text: &str) -> Amount {
    text.parse().unwrap()
}

fn provider() -> Provider {
    Fleet::local().seed(1).provider("p")
}

/// Each call is taken to cost this.
fn flat(text: &str) -> impl Fn(&Request) -> Amount + Clone + use<> {
    let each = amount(text);
    move |_| each
}

/// A dollar for a million tokens, in or out.
fn prices() -> OfBody<Prices> {
    llm(Prices::new(amount("1"), amount("1")))
}

fn of(task: &Task) -> Request {
    let mut request = request(0);
    request.extensions_mut().insert(task.clone());
    request
}

fn refused_with<T>(outcome: Result<T, BoxError>) -> Option<Refusal> {
    outcome.err().and_then(|error| Refusal::find(&*error).cloned())
}

// ------------------------------------------------------------------------------------------------ spend

// BerriAI/litellm#34732, #40095, #40002: parallel calls all passed the check before the first was billed; four of
// five went through a cap of 0.45 at 0.15 each.
#[tokio::test(start_paused = true)]
async fn litellm_34732_40095_40002_five_at_once_of_fifteen_cents_find_room_for_three() {
    let script = Script::always(answer(200).after(secs(1)));
    let layer = SpendLayer::new(&provider(), flat("0.15"), prices());
    // However many services there are, and whichever way they were made.
    let task = Task::new(1).spend(amount("0.45"));
    let calls: Vec<_> =
        (0..5).map(|_| tokio::spawn(layer.clone().layer(script.clone()).oneshot(of(&task)))).collect();
    let mut refused = 0;
    for call in calls {
        if let Some(refusal) = refused_with(call.await.unwrap()) {
            assert_eq!((refusal.kind, refusal.retry_at), (RefusalKind::Spend, None));
            refused += 1;
        }
    }
    assert_eq!((refused, script.calls()), (2, 3));
    // Nobody was told what they cost: they stay charged, to the last millionth.
    let allowance = task.spend_allowance().unwrap();
    assert_eq!((allowance.left(), allowance.spent()), (Amount::ZERO, amount("0.45")));
}

// Look and take are one step: two threads that set out at the same instant, and room for one of them.
#[test]
fn litellm_34732_on_real_threads_too() {
    const ROUNDS: usize = 10_000;
    let sent = Arc::new(AtomicUsize::new(0));
    let counting = sent.clone();
    let inner = service_fn(move |_: Request| {
        counting.fetch_add(1, Ordering::SeqCst);
        std::future::ready(Ok::<_, Infallible>(http::Response::new(String::new())))
    });
    let layer = SpendLayer::new(&provider(), flat("0.15"), prices());
    let tasks: Vec<Task> = (0..ROUNDS as u64).map(|id| Task::new(id).spend(amount("0.20"))).collect();
    let arrived = AtomicUsize::new(0);
    std::thread::scope(|scope| {
        for thread in 0..2 {
            let (layer, inner, tasks, arrived) = (&layer, &inner, &tasks, &arrived);
            scope.spawn(move || {
                let mut service = layer.layer(inner.clone());
                for (round, task) in tasks.iter().enumerate() {
                    // Every other round each by a child of its own.
                    let task =
                        if round % 2 == 0 { task.clone() } else { task.child(thread).spend(amount("0.20")) };
                    let request = of(&task);
                    arrived.fetch_add(1, Ordering::SeqCst);
                    let mut turns = 0_u32;
                    while arrived.load(Ordering::SeqCst) < 2 * (round + 1) {
                        turns += 1;
                        // To yield at once would part the two; never to yield, stop a machine of one core.
                        if turns.is_multiple_of(4096) {
                            std::thread::yield_now();
                        } else {
                            std::hint::spin_loop();
                        }
                    }
                    drop(service.call(request).now_or_never().expect("it waits for nothing"));
                }
            });
        }
    });
    assert_eq!(sent.load(Ordering::SeqCst), ROUNDS);
}

// nodetool-ai/nodetool#5489: each child opened an allowance of its own, and they spent 2.00 of 1.25.
#[tokio::test(start_paused = true)]
async fn nodetool_5489_children_draw_on_their_parent() {
    let script = Script::always(answer(200));
    let service = SpendLayer::new(&provider(), flat("0.25"), prices()).layer(script.clone());
    let parent = Task::new(1).spend(amount("1.25"));
    // Own limits that sum up to more; children of children; and one that may spend all its parent has.
    let first = parent.child(2).spend(amount("0.50"));
    let grandchild = first.child(3).spend(amount("100"));
    let second = parent.child(4).spend(amount("0.50"));
    let third = parent.child(5);
    let mut spent = Vec::new();
    for task in [&first, &grandchild, &second, &third] {
        let mut calls = 0;
        while refused_with(service.clone().oneshot(of(task)).await).is_none() {
            calls += 1;
        }
        spent.push(calls);
    }
    assert_eq!(spent, [2, 0, 2, 1]);
    assert_eq!(script.calls(), 5);
    assert_eq!(parent.spend_allowance().unwrap().spent(), amount("1.25"));
    assert_eq!(refused_with(service.oneshot(of(&parent)).await).map(|r| r.kind), Some(RefusalKind::Spend));
}

// topoteretes/cognee#4321: its own "budget exceeded" looked like the provider's 429, and was retried.
#[tokio::test(start_paused = true)]
async fn cognee_4321_our_own_no_is_final_and_no_429() {
    let fleet = Fleet::local().seed(1);
    let [dear, cheap] = ["dear", "cheap"].map(|name| fleet.provider(name));
    let script = Script::always(answer(200));
    let rung = |provider: &Provider| {
        let layers = ServiceBuilder::new()
            .layer(SpendLayer::new(provider, flat("0.50"), prices()))
            .layer(RetryAfterLayer::new(provider))
            .layer(FleetLimitLayer::new(provider))
            .layer(ClassifyLayer::new(provider));
        Rung::new(provider, layers.service(script.clone()))
    };
    let ladder = HashedFailover::new([rung(&cheap), rung(&dear).tier(1)]).unwrap();
    let service = JitteredRetryLayer::new().budget(Unlimited).layer(ladder);
    let task = Task::new(1).spend(amount("0.40"));
    let start = Instant::now();
    let error = service.oneshot(of(&task)).await.expect_err("refused");
    let refusal = Refusal::find(&*error).expect("a refusal");
    assert_eq!((refusal.kind, refusal.retry_at), (RefusalKind::Spend, None));
    assert!(refusal.kind.is_terminal());
    assert_eq!((script.calls(), start.elapsed()), (0, ms(0)), "nobody sent it again, nobody waited");
    assert_eq!(tower_herd::classify::signal_of_error(&*error).kind, Kind::Refused);
    let reply = refusal.to_response::<String>();
    assert_eq!(
        (reply.status().as_u16(), &reply.headers()["x-should-retry"]),
        (503, &"false".parse().unwrap())
    );
    // And the provider's own 429 costs nothing, and is retried.
    let script =
        Script::new(|nth, _| if nth == 0 { answer(429).header("retry-after", 1) } else { answer(200) });
    let spend = SpendLayer::new(&dear, flat("0.50"), prices());
    let service = JitteredRetryLayer::new().budget(Unlimited).layer(spend.layer(script.clone()));
    let task = Task::new(1).spend(amount("0.50"));
    assert_eq!(service.oneshot(of(&task)).await.unwrap().status(), 200);
    assert_eq!(script.calls(), 2, "0.50 is enough for both");
}

/// What a stream sends before it breaks, or goes on.
fn events(
    pieces: Vec<Result<&'static str, std::io::Error>>,
) -> http::Response<impl http_body::Body<Data = Bytes, Error = std::io::Error>> {
    let frames = pieces.into_iter().map(|piece| piece.map(|text| http_body::Frame::data(Bytes::from(text))));
    let body = StreamBody::new(futures_util::stream::iter(frames));
    http::Response::builder().header("content-type", "text/event-stream").body(body).unwrap()
}

// BerriAI/litellm#33273, #39462: a stream broke, the fallback answered, and the tokens of the first were gone.
#[tokio::test(start_paused = true)]
async fn litellm_33273_39462_the_tokens_of_an_aborted_stream_are_summed() {
    const START: &str = "data: {\"type\":\"message_start\",\"message\":{\"usage\":{\"input_tokens\":300000,\"output_tokens\":1}}}\n\n";
    const TEXT: &str = "data: {\"type\":\"content_block_delta\",\"delta\":{\"text\":\"x\"}}\n\n";
    const END: &str = "data: {\"type\":\"message_delta\",\"usage\":{\"output_tokens\":100000}}\n\ndata: {\"type\":\"message_stop\"}\n\n";
    let broken = || Err(std::io::Error::from(std::io::ErrorKind::ConnectionReset));
    for (estimate, aborted) in [
        // Nothing was told: the estimate. Less was told than estimated: the estimate. More: that.
        ("0.35", vec![Ok(TEXT), broken()]),
        ("0.35", vec![Ok(START), Ok(TEXT), broken()]),
        ("0.20", vec![Ok(START), Ok(TEXT), broken()]),
    ] {
        let first =
            if aborted.len() == 3 && estimate == "0.20" { amount("0.300001") } else { amount(estimate) };
        let attempts = Arc::new(std::sync::Mutex::new(vec![vec![Ok(START), Ok(TEXT), Ok(END)], aborted]));
        let inner = service_fn(move |_: Request| {
            let pieces = attempts.lock().unwrap().pop().unwrap();
            async { Ok::<_, Infallible>(events(pieces)) }
        });
        let service = SpendLayer::new(&provider(), flat(estimate), prices()).layer(inner);
        let task = Task::new(1).spend(amount("5"));
        let spent = || task.spend_allowance().unwrap().spent();
        let reply = service.clone().oneshot(of(&task)).await.unwrap();
        assert!(reply.into_body().collect().await.is_err());
        assert_eq!(spent(), first);
        // The fallback, or the retry: of the same task.
        let reply = service.oneshot(of(&task)).await.unwrap();
        reply.into_body().collect().await.unwrap();
        assert_eq!(spent(), first + amount("0.4"), "both attempts, the second exactly");
    }
}

// llm-exe#797: the client's timeout did not stop the completion, and the retry was billed again.
#[tokio::test(start_paused = true)]
async fn llm_exe_797_a_timeout_after_the_send_may_have_been_billed() {
    let provider = provider();
    let script = Script::always(answer(200).after(secs(60)));
    let service = ServiceBuilder::new()
        .layer(JitteredRetryLayer::new().budget(Unlimited))
        .layer(SpendLayer::new(&provider, flat("0.40"), prices()))
        .layer(FleetLimitLayer::new(&provider))
        .layer(ClassifyLayer::new(&provider))
        .layer(AttemptTimeoutLayer::new(secs(5)))
        .service(script.clone());
    let task = Task::new(1).spend(amount("1"));
    let error = service.clone().oneshot(of(&task)).await.expect_err("every attempt times out");
    // Two attempts are charged, a third is not made: the caller gets the last real outcome.
    assert!(Refusal::find(&*error).is_none(), "{error}");
    assert_eq!(script.calls(), 2);
    assert_eq!(task.spend_allowance().unwrap().spent(), amount("0.80"));
    // Who drops the call after it was sent leaves it charged, too.
    let other = Task::new(2).spend(amount("1"));
    assert!(tokio::time::timeout(secs(1), service.oneshot(of(&other))).await.is_err());
    assert_eq!(other.spend_allowance().unwrap().spent(), amount("0.40"));
}

/// How many calls pass until one is refused, and why.
async fn until_refused<S, Res>(service: &S, task: &Task) -> (usize, &'static str)
where
    S: Service<Request, Response = Res, Error = BoxError> + Clone,
{
    let mut calls = 0;
    loop {
        match refused_with(service.clone().oneshot(of(task)).await) {
            Some(refusal) => return (calls, refusal.why),
            None => calls += 1,
        }
    }
}

// NousResearch/hermes-agent#91713: 18.7 million tokens in five hours, in a loop with a tool that always failed.
#[tokio::test(start_paused = true)]
async fn hermes_agent_91713_a_futile_loop_ends_at_the_cap_of_its_tool() {
    let fleet = Fleet::local();
    let script = Script::always(answer(500));
    // Tokens, this time.
    let tokens = |_: &Request| Amount::units(20_000);
    let used = llm(|usage: &Usage| Amount::units(usage.total()));
    let tool = |name: &str, limit| {
        let layer = SpendLayer::new(&fleet.provider(name), tokens, used).per_task(Amount::units(limit));
        layer.layer(script.clone())
    };
    let (broken, other) = (tool("broken", 100_000), tool("other", 100_000));
    let task = Task::new(1).spend(Amount::units(150_000));
    assert_eq!(until_refused(&broken, &task).await, (5, "what its task may spend here is used up"));
    // A sub-agent is no way around it, nor is a task made of this one.
    assert_eq!(until_refused(&broken, &task.child(2)).await.0, 0);
    assert_eq!(until_refused(&broken, &task.clone().caller("again")).await.0, 0);
    // The other tool still works, as far as the task may spend at all.
    assert_eq!(until_refused(&other, &task).await, (2, "what its task may spend is used up"));
    assert_eq!(script.calls(), 7);
    // Another task has its own.
    assert_eq!(until_refused(&broken, &Task::new(3)).await.0, 5);
    // And a cap on the tool itself, whoever calls it.
    let month = Allowance::new(Amount::units(60_000));
    let capped =
        SpendLayer::new(&fleet.provider("capped"), tokens, used).within(&month).layer(script.clone());
    assert_eq!(until_refused(&capped, &Task::new(4)).await, (3, "what may be spent here is used up"));
    month.top_up(Amount::units(20_000));
    assert_eq!(until_refused(&capped, &Task::new(5)).await.0, 1);
}

// ----------------------------------------------------------------------------------------------- tokens

fn limited(per_minute: u32) -> Provider {
    let settings = ProviderSettings::new().ceiling(1000).tokens_per_minute(per_minute);
    Fleet::local().configure("p", settings).unwrap()
}

// BerriAI/litellm#23775 (#18730): tokens were counted when the reply came, and 663 of 100 went through.
#[tokio::test(start_paused = true)]
async fn litellm_23775_tokens_are_taken_before_the_send() {
    let provider = limited(60);
    let script = Script::always(answer(200).after(secs(30)));
    let service = TokenLimitLayer::new(&provider).estimate(|_: &Request| 10_u64).layer(script.clone());
    let start = Instant::now();
    let calls: Vec<_> = (0..20).map(|i| tokio::spawn(service.clone().oneshot(request(i)))).collect();
    tokio::time::sleep(secs(5)).await;
    assert_eq!(script.calls(), 6, "a burst of sixty, though nobody has replied");
    for call in calls {
        call.await.unwrap().unwrap();
    }
    // One every ten seconds from then on.
    let expected: Vec<u64> = (0..20).map(|i: u64| i.saturating_sub(5) * 10_000).collect();
    assert_eq!(script.times(start), expected);
}

// BerriAI/litellm#28805, #29193: a default estimate of 1024 above the bucket refused the very first call, for ever.
#[tokio::test(start_paused = true)]
async fn litellm_28805_29193_a_guess_above_the_bucket_is_taken_for_the_bucket() {
    let provider = limited(600);
    let script = Script::always(
        answer(200)
            .after(ms(1))
            .header("content-type", "application/json")
            .body(r#"{"usage":{"prompt_tokens":3,"completion_tokens":2}}"#),
    );
    // Its guess is over a thousand.
    let service = TokenLimitLayer::new(&provider).layer(script.clone());
    let start = Instant::now();
    for i in 0..10 {
        let reply = service.clone().oneshot(request(i)).await.unwrap();
        reply.into_body().collect().await.unwrap();
    }
    // Each waits for a full bucket, of which the one before took five: half a second.
    let last = script.times(start)[9];
    assert!((9 * 500..9 * 501 + 10).contains(&last), "{last}");
}

// BerriAI/litellm#37001: of two fields that limit the output the smaller one was reserved.
#[tokio::test(start_paused = true)]
async fn litellm_37001_what_is_declared_is_reserved_whole() {
    let provider = limited(60);
    let script = Script::always(answer(200));
    let service = TokenLimitLayer::new(&provider).patience(ms(0)).layer(script.clone());
    let declared = |tokens| {
        let mut request = request(1);
        request.extensions_mut().insert(DeclaredTokens(tokens));
        request
    };
    service.clone().oneshot(declared(40)).await.unwrap();
    let refusal = refused_with(service.clone().oneshot(declared(40)).await).unwrap();
    assert_eq!((refusal.kind, refusal.wait()), (RefusalKind::Tokens, Some(secs(20))));
    assert_eq!(script.calls(), 1);
}

// BerriAI/litellm#34223: what was reserved for a call that failed was never given back.
#[tokio::test(start_paused = true)]
async fn litellm_34223_what_was_not_executed_is_given_back() {
    let provider = limited(60);
    for (status, given_back) in [(429, true), (401, true), (500, false)] {
        let script = Script::always(answer(status));
        let service = TokenLimitLayer::new(&provider).estimate(|_: &Request| 60_u64).patience(ms(0));
        tokio::time::sleep(secs(60)).await;
        let service = service.layer(script.clone());
        service.clone().oneshot(request(1)).await.unwrap();
        let again = service.oneshot(request(2)).await;
        assert_eq!(refused_with(again).is_none(), given_back, "{status}");
    }
}

// rwz/redis-gcra#6: a cost above the burst was neither refused nor ever let through.
#[tokio::test(start_paused = true)]
async fn redis_gcra_6_a_cost_above_the_burst_fails_at_once_and_is_in_nobodys_way() {
    let provider = limited(60);
    let script = Script::always(answer(200));
    let cost = Arc::new(AtomicU64::new(61));
    let asked = cost.clone();
    let estimate = move |_: &Request| TokenEstimate::Declared(asked.load(Ordering::SeqCst));
    let service = TokenLimitLayer::new(&provider).estimate(estimate).layer(script.clone());
    let start = Instant::now();
    let refusal = refused_with(service.clone().oneshot(request(1)).await).unwrap();
    assert_eq!((refusal.kind, refusal.retry_at), (RefusalKind::TooLarge, None));
    cost.store(60, Ordering::SeqCst);
    service.clone().oneshot(request(2)).await.unwrap();
    assert_eq!((script.calls(), start.elapsed()), (1, ms(0)), "it took nothing");
    // Nor does one that waits keep it from being told.
    let waits = tokio::spawn(service.clone().oneshot(request(3)));
    tokio::time::sleep(ms(1)).await;
    cost.store(1000, Ordering::SeqCst);
    assert_eq!(refused_with(service.oneshot(request(4)).await).unwrap().kind, RefusalKind::TooLarge);
    waits.await.unwrap().unwrap();
    assert_eq!(start.elapsed(), secs(60));
    // In a ladder another rung takes it.
    let large = limited(1_000_000);
    let rung = |provider: &Provider| {
        let layer = TokenLimitLayer::new(provider).estimate(|_: &Request| 1000_u64);
        Rung::new(provider, layer.layer(FleetLimitLayer::new(provider).layer(script.clone())))
    };
    let ladder = HashedFailover::new([rung(&provider), rung(&large.scope("other")).tier(1)]);
    assert_eq!(ladder.unwrap().oneshot(request(5)).await.unwrap().status(), 200);
}

// What is no HTTP is counted alike.
#[tokio::test(start_paused = true)]
async fn replies_that_are_not_http_are_counted_by_what_they_say() {
    let classify = classify_fn(|outcome: Result<&u64, &(dyn Error + 'static)>| match outcome {
        Ok(_) => Signal::new(Kind::Success),
        Err(error) => tower_herd::classify::signal_of_error(error),
    });
    let provider = limited(60);
    let month = Allowance::new(Amount::units(100));
    let mut service = ServiceBuilder::new()
        .layer(
            SpendLayer::new(
                &provider,
                |_: &u64| Amount::units(30),
                of_reply(|used: &u64| Some(Amount::units(*used))),
            )
            .within(&month)
            .classify(classify),
        )
        .layer(
            TokenLimitLayer::with(&provider, |_: &u64| 30_u64, of_reply(|used: &u64| Some(*used)))
                .classify(classify),
        )
        .service(service_fn(|used: u64| async move { Ok::<_, Infallible>(used) }));
    let start = Instant::now();
    // The third has to wait until 10 + 45 + 30 are no more than 60.
    for used in [10, 45, 5] {
        assert_eq!(service.ready().await.unwrap().call(used).await.unwrap(), used);
    }
    assert_eq!(start.elapsed(), secs(25));
    assert_eq!(month.spent(), Amount::units(60));
}
