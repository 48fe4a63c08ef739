//! Public reports about waits that were not kept, or kept too long: what our pause does there.

mod common;

use common::{Answer, Script, answer, ms, request, retrying, rung, secs, until};
use std::{sync::atomic::Ordering, time::Duration};
use tokio::time::Instant;
use tower::{Layer, ServiceExt};
use tower_herd::{Exhausted, Fleet, PauseReason, Refusal, RefusalKind, RetryAfterLayer, Task};

/// First this, then successes.
fn first(first: Answer) -> Script {
    Script::new(move |nth, _| if nth == 0 { first.clone() } else { answer(200) })
}

/// When the second call comes, in milliseconds after a first one that was answered with this. The
/// gate keeps a call back; nothing here sends again.
async fn second_call(reply: Answer) -> u64 {
    let provider = Fleet::local().provider("p");
    let script = first(reply);
    let service = RetryAfterLayer::new(&provider).layer(script.clone());
    let start = Instant::now();
    service.clone().oneshot(until(0, secs(400_000))).await.unwrap();
    service.oneshot(until(1, secs(400_000))).await.unwrap();
    script.times(start)[1]
}

#[tokio::test(start_paused = true)]
async fn what_the_reply_says_is_how_long_nobody_calls() {
    let throttled = || answer(429);
    for (report, reply, expected) in [
        (
            "openai/openai-python#937: only a reset header",
            throttled().header("x-rate-limit-reset-tokens", 55),
            55_000,
        ),
        // Not a hint, and not a loop without sleep either: our own second.
        (
            "openai/openai-dotnet#838: sentinels",
            throttled().header("x-ratelimit-remaining-tokens", -1).header("x-ratelimit-reset-tokens", 0),
            1000,
        ),
        ("pnp/pnpjs#1112, Azure/azure-sdk-for-net#5268: seconds", throttled().header("retry-after", 5), 5000),
        ("the same: milliseconds", throttled().header("x-ms-retry-after-ms", 5000), 5000),
        (
            "twilight-rs/twilight#787, discord/discord-api-docs#4722: seconds with a fraction",
            throttled()
                .header("x-ratelimit-global", true)
                .header("x-ratelimit-reset-after", "64.57")
                .header("x-ratelimit-remaining", 0),
            64_570,
        ),
        (
            "openai/openai-java#853: a negative wait is none, our own second",
            throttled().header("retry-after", -5),
            1000,
        ),
        (
            "curl/curl#15833, block/goose#9161: a past date is zero",
            throttled()
                .header("date", "Tue, 14 Nov 2023 22:13:20 GMT")
                .header("retry-after", "Tue, 14 Nov 2023 22:13:10 GMT"),
            0,
        ),
        (
            "will-ockmore/httpx-retries#13: by the server's own clock",
            throttled()
                .header("date", "Tue, 14 Nov 2023 23:13:20 GMT")
                .header("retry-after", "Tue, 14 Nov 2023 23:13:30 GMT"),
            10_000,
        ),
        ("openai/openai-python#3555: more than a minute", throttled().header("retry-after", 61), 61_000),
        ("urllib3/urllib3#1338: an hour", throttled().header("retry-after", 299), 299_000),
        ("apache/iggy#4168: on a 503 too", answer(503).header("retry-after", 9), 9000),
        ("apache/iggy#4168: a 503 that names no wait pauses nobody", answer(503), 0),
        (
            "brandur/redis-cell#58: a part of a second counts",
            throttled().header("retry-after-ms", 7001),
            7001,
        ),
    ] {
        let came = second_call(reply).await;
        assert!((expected..expected + 5).contains(&came), "{report}: {came} and not {expected} ms");
    }
}

// urllib3/urllib3#3743: a huge value overflowed the timer; #1338: an hour was slept in silence.
// apache/iggy#4168: honoured without any cap.
#[tokio::test(start_paused = true)]
async fn urllib3_3743_1338_a_wait_beyond_reason_is_capped_told_and_not_slept() {
    let day = secs(24 * 3600);
    for (value, held) in [
        ("9007199254740993", day),
        ("18446744073709551615", day),
        ("99999999999999999999999999", day),
        ("3600", secs(3600)),
    ] {
        for status in [429, 503] {
            let provider = Fleet::local().provider("p");
            let script = first(answer(status).header("retry-after", value));
            let service = retrying(rung(&provider, script.clone()));
            let start = Instant::now();
            let reply = service.clone().oneshot(until(1, secs(60))).await.unwrap();
            assert_eq!(
                (reply.status().as_u16(), start.elapsed()),
                (status, Duration::ZERO),
                "{value}: at once"
            );
            let exhausted = reply.extensions().get::<Exhausted>().expect("stamped");
            assert!(exhausted.retry_at.is_some_and(|at| at >= start + held), "{value}: {exhausted:?}");
            let (until_, _) = provider.paused_until().unwrap_or_else(|| panic!("{value} {status}"));
            assert_eq!(until_ - start, held, "{value}");
            let error = service.oneshot(until(2, secs(1))).await.unwrap_err();
            let refusal = Refusal::find(&*error).unwrap();
            assert_eq!((refusal.kind, refusal.retry_at), (RefusalKind::Paused, Some(until_)), "{value}");
            assert_eq!((start.elapsed(), script.calls()), (Duration::ZERO, 1), "{value}");
        }
    }
}

#[tokio::test(start_paused = true)]
async fn freellmapi_158_three_429_in_a_minute_do_not_bench_a_provider_for_hours() {
    // With the minute's own reset, while something is left of the day; and without any hint.
    let minute = answer(429)
        .header("x-ratelimit-remaining-requests-minute", 0)
        .header("x-ratelimit-reset-requests-minute", 20)
        .header("x-ratelimit-remaining-requests-day", 3)
        .header("x-ratelimit-reset-requests-day", 40_000);
    for (reply, longest) in [(minute, secs(20)), (answer(429), secs(4))] {
        let provider = Fleet::local().provider("p");
        let script = Script::new(move |nth, _| if nth < 3 { reply.clone() } else { answer(200) });
        let service = rung(&provider, script.clone());
        for nth in 0..3 {
            service.clone().oneshot(request(nth)).await.unwrap();
            let (until, reason) = provider.paused_until().unwrap();
            assert!(until - Instant::now() <= longest, "after {nth}: {:?}", until - Instant::now());
            assert!(matches!(reason, PauseReason::Hint | PauseReason::Bare));
        }
        service.oneshot(request(3)).await.unwrap();
        assert!(provider.paused_until().is_none());
        assert_eq!(script.calls(), 4);
    }
}

#[tokio::test(start_paused = true)]
async fn openai_python_3555_never_earlier_than_the_hint_however_long() {
    for hint in [61, 90, 300, 3600] {
        let provider = Fleet::local().provider("p");
        let script = first(answer(429).header("retry-after", hint));
        let start = Instant::now();
        let reply = retrying(rung(&provider, script.clone())).oneshot(until(1, secs(6000))).await.unwrap();
        let again = script.times(start)[1];
        assert_eq!(reply.status(), 200);
        assert!((hint * 1000..=hint * 1500 + 5).contains(&again), "{hint} s: {again} ms");
    }
}

#[tokio::test(start_paused = true)]
async fn litellm_40130_the_later_end_of_two_overlapping_waits_holds() {
    // Two calls in flight together: 1 s is said first, and then a minute.
    let provider = Fleet::local().provider("p");
    let script = Script::new(|nth, _| match nth {
        0 => answer(429).header("retry-after", 1).after(ms(400)),
        1 => answer(429).header("retry-after", 60).after(ms(900)),
        _ => answer(200),
    });
    let service = rung(&provider, script.clone());
    let start = Instant::now();
    let both: Vec<_> = (0..2).map(|i| tokio::spawn(service.clone().oneshot(request(i)))).collect();
    tokio::time::sleep(ms(500)).await;
    // Waits for the end of the first pause, which is the second's by then.
    let waiter = tokio::spawn(service.oneshot(request(2)));
    for call in both {
        call.await.unwrap().unwrap();
    }
    waiter.await.unwrap().unwrap();
    let times = script.times(start);
    let spaced = times[1];
    assert!(spaced < 600 && times[2] >= spaced + 60_900, "{times:?}");
    // And the other way round: a shorter one does not cut it.
    let provider = Fleet::local().provider("q");
    provider.pause_for(secs(60));
    provider.pause_for(secs(1));
    assert_eq!(provider.paused_until().unwrap().0, Instant::now() + secs(60));
}

// gajae-code#2444, openclaw/openclaw#90717: the reset that was told is days away, capacity is back
// after an hour.
#[tokio::test(start_paused = true)]
async fn gajae_2444_openclaw_90717_days_of_pause_are_probed_and_end_with_the_trouble() {
    let provider = Fleet::local().provider("p");
    let start = Instant::now();
    let script = Script::new(move |_, _| match start.elapsed() < secs(3600) {
        true => answer(429).header("retry-after", 5 * 24 * 3600),
        false => answer(200),
    });
    let service = rung(&provider, script.clone());
    let mut served = None;
    for second in (0..20 * 3600).step_by(10) {
        let id = second as u64;
        if service.clone().oneshot(until(id, secs(30))).await.is_ok_and(|reply| reply.status() == 200) {
            served.get_or_insert(start.elapsed());
        }
        tokio::time::advance(secs(10)).await;
    }
    let served = served.expect("somebody got through");
    assert!(served < secs(3600 + 4400), "{served:?}: an hour, and one probe's distance");
    let in_vain = script.times(start).iter().filter(|at| **at < 3_600_000).count();
    assert!(in_vain <= 2, "sparse: {in_vain}");
    assert!(script.calls() > 4000, "all others go after it: {}", script.calls());
}

#[tokio::test(start_paused = true)]
async fn bifrost_6971_openhuman_6504_vercel_ai_5018_the_hint_holds_for_who_sends_again() {
    let provider = Fleet::local().provider("p");
    let script = first(answer(429).header("retry-after", 60));
    let start = Instant::now();
    retrying(rung(&provider, script.clone())).oneshot(until(1, secs(300))).await.unwrap();
    assert!(script.times(start)[1] >= 60_000);
}

// ssmanji89/toast-pos-mcp#25: a global limit, learned at one location, did not stop the others.
#[tokio::test(start_paused = true)]
async fn toast_25_a_global_limit_stops_all_scopes_and_one_of_a_route_only_that() {
    for (headers, stops_all) in [(vec![("x-ratelimit-global", "true")], true), (vec![], false)] {
        let provider = Fleet::local().provider("api");
        let [here, there] = ["location-1", "location-2"].map(|name| provider.scope(name));
        let mut limited = answer(429).header("retry-after", 30);
        for (name, value) in headers {
            limited = limited.header(name, value);
        }
        let script = first(limited);
        rung(&here, script.clone()).oneshot(request(1)).await.unwrap();
        let start = Instant::now();
        assert!(here.paused_until().is_some());
        assert_eq!(
            (there.paused_until().is_some(), provider.paused_until().is_some()),
            (stops_all, stops_all)
        );
        rung(&there, script.clone()).oneshot(request(2)).await.unwrap();
        assert_eq!(start.elapsed() >= secs(30), stops_all);
        // Another account is another provider, and hears of nothing.
        assert!(Fleet::local().provider("api-2").paused_until().is_none());
    }
}

// NousResearch/hermes-agent#109234: 19 of 20 agents waited exactly 600.0 s and came back in one instant.
#[tokio::test(start_paused = true)]
async fn hermes_agent_109234_whoever_waited_at_the_gate_comes_back_as_a_line() {
    for hint in [30, 300, 600] {
        let provider = Fleet::local().provider("p");
        let start = Instant::now();
        let script = Script::new(move |_, _| match secs(hint).checked_sub(start.elapsed()) {
            Some(left) => answer(429).header("retry-after-ms", left.as_millis()),
            None => answer(200).after(secs(1)),
        });
        let service = rung(&provider, script.clone());
        service.clone().oneshot(request(0)).await.unwrap();
        let agents = (1..=30).map(|i| tokio::spawn(service.clone().oneshot(until(i, secs(2000)))));
        for agent in agents.collect::<Vec<_>>() {
            agent.await.unwrap().unwrap();
        }
        let times = script.times(start);
        let early = times[1..].iter().filter(|at| **at < hint * 1000).count();
        assert_eq!(early, usize::from(hint > 300), "the one probe of a pause over five minutes: {times:?}");
        let again = &times[1 + early..];
        assert!(again.windows(5).all(|five| five[4] - five[0] >= 100), "{hint} s: {times:?}");
        assert!(*again.last().unwrap() <= hint * 1500 + 1000, "{hint} s: {times:?}");
    }
}

// gabrielkoerich/orch#329: all that had been benched for the same time recovered on the same tick.
// Forty processes with a pause each and a retry layer each; told the same wait within a second.
#[tokio::test(start_paused = true)]
async fn orch_329_processes_that_know_nothing_of_each_other_recover_at_different_instants() {
    let script =
        Script::new(|nth, _| if nth < 40 { answer(429).header("retry-after", 30) } else { answer(200) });
    let start = Instant::now();
    let all: Vec<_> = (0..40)
        .map(|i| {
            let provider = Fleet::local().seed(i).provider("p");
            let layer = tower_herd::JitteredRetryLayer::new().seed(i);
            tokio::spawn(layer.layer(rung(&provider, script.clone())).oneshot(until(i, secs(200))))
        })
        .collect();
    for one in all {
        assert_eq!(one.await.unwrap().unwrap().status(), 200);
    }
    let mut again = script.times(start).split_off(40);
    again.sort_unstable();
    assert!(again[0] >= 30_000 && *again.last().unwrap() <= 45_010, "{again:?}");
    assert!(again.windows(7).all(|seven| seven[6] - seven[0] > 100), "{again:?}");
}

// openabdev/openab#969, HybridAIOne/hybridclaw#413: each call that was turned away set the clock back.
#[tokio::test(start_paused = true)]
async fn openab_969_hybridclaw_413_who_is_turned_away_does_not_prolong_the_pause() {
    let provider = Fleet::local().provider("p");
    let script = first(answer(429).header("retry-after", 30));
    let service = rung(&provider, script.clone());
    service.clone().oneshot(request(0)).await.unwrap();
    let (ends, _) = provider.paused_until().unwrap();
    for i in 0..290 {
        service.clone().oneshot(until(i, ms(50))).await.unwrap_err();
        tokio::time::advance(ms(100)).await;
        assert_eq!(provider.paused_until().map(|(at, _)| at), Some(ends));
    }
    service.oneshot(until(1000, secs(10))).await.unwrap();
    assert!(Instant::now() < ends + ms(10));
    assert_eq!(script.calls(), 2);
}

// rohitg00/agentmemory#1075: three 429s, and 113 calls failed on an open circuit.
#[tokio::test(start_paused = true)]
async fn agentmemory_1075_429s_close_the_gate_for_a_while_and_nobody_fails() {
    let provider = Fleet::local().provider("p");
    let script = Script::new(|nth, _| match nth {
        0..3 => answer(429).header("retry-after", 2).after(ms(100)),
        _ => answer(200).after(ms(100)),
    });
    let service = retrying(rung(&provider, script.clone()));
    let start = Instant::now();
    let all: Vec<_> = (0..116).map(|i| tokio::spawn(service.clone().oneshot(until(i, secs(120))))).collect();
    for one in all {
        assert_eq!(one.await.unwrap().unwrap().status(), 200, "the provider is not dead");
    }
    assert_eq!((provider.throttled(), script.calls()), (3, 119));
    assert!(start.elapsed() < secs(30), "{:?}", start.elapsed());
    assert!(provider.paused_until().is_none() && provider.ceiling() >= 1);
}

// agentgateway#1500: no header, and nothing happened at all.
#[tokio::test(start_paused = true)]
async fn agentgateway_1500_a_bare_429_has_a_penalty_by_default() {
    let provider = Fleet::local().provider("p");
    let script = first(answer(429));
    let service = rung(&provider, script.clone());
    let start = Instant::now();
    service.clone().oneshot(request(0)).await.unwrap();
    assert_eq!(provider.paused_until(), Some((start + secs(1), PauseReason::Bare)));
    service.oneshot(request(1)).await.unwrap();
    assert!((1000..1010).contains(&script.times(start)[1]));
}

// BerriAI/litellm#5225, samosa-ai-com/opencode-go-multi-auth#6: a request at fault stopped everybody.
#[tokio::test(start_paused = true)]
async fn litellm_5225_a_rejected_request_changes_nothing_for_others() {
    let provider = Fleet::local().provider("p");
    let script = Script::new(|nth, _| if nth % 2 == 0 { answer(400) } else { answer(200) });
    let service = retrying(rung(&provider, script.clone()));
    let (start, ceiling) = (Instant::now(), provider.ceiling());
    for i in 0..50 {
        let reply = service.clone().oneshot(request(i)).await.unwrap();
        assert_eq!(reply.status(), if i % 2 == 0 { 400 } else { 200 });
        assert!(provider.paused_until().is_none() && provider.ceiling() >= ceiling);
    }
    assert_eq!((script.calls(), start.elapsed() < ms(50)), (50, true), "none was sent again, none waited");
}

// redisson/redisson#7264, diegosouzapw/OmniRoute#13836: a place that is lost on a path of errors is
// lost for ever. The one probe of a long pause is such a place.
#[tokio::test(start_paused = true)]
async fn redisson_7264_a_probe_that_is_dropped_or_fails_is_followed_by_another() {
    let provider = Fleet::local().provider("p");
    let script = Script::new(|nth, _| match nth {
        0 => answer(429).header("retry-after", 3600 * 10),
        1 => answer(200).after(secs(3600)), // given up
        2 => answer(500),
        3 => answer(200).after(secs(3600)), // its task is dropped while it runs
        _ => answer(200),
    });
    let service = rung(&provider, script.clone());
    service.clone().oneshot(request(0)).await.unwrap();
    let start = Instant::now();
    while script.calls() < 5 {
        let call = tokio::spawn(service.clone().oneshot(until(1, secs(1))));
        tokio::time::sleep(ms(100)).await;
        call.abort();
        tokio::time::sleep(secs(60)).await;
        assert!(start.elapsed() < secs(3 * 3600 + 1000), "probes ended after {}", script.calls());
    }
    // every 30 minutes
    assert!(provider.paused_until().is_none(), "the probe that succeeded ended it");
    let in_flight = script.in_flight.load(Ordering::SeqCst);
    assert_eq!((provider.waiting(), in_flight), (0, 0));
    service.oneshot(request(9)).await.unwrap();
}

// BerriAI/litellm#3646, #27823, #4695, OrcaRouter-Lite#121 for one provider: an instant error without
// an instant. Here the refusal has one, and handed on it is a Retry-After, rounded up.
#[tokio::test(start_paused = true)]
async fn litellm_3646_a_refusal_says_when_in_the_terms_of_http() {
    let provider = Fleet::local().provider("p");
    provider.pause_for(ms(90_400));
    let service = rung(&provider, Script::always(answer(200)));
    let error = service.oneshot(until(1, secs(10))).await.unwrap_err();
    let reply = Refusal::find(&*error).unwrap().to_response::<String>();
    assert!(matches!(reply.status().as_u16(), 429 | 503));
    assert_eq!(reply.headers()["retry-after"], "91");
}

/// Of a task without a deadline a wait is bounded too.
#[tokio::test(start_paused = true)]
async fn urllib3_1338_without_a_deadline_nobody_hangs_for_an_hour() {
    let provider = Fleet::local().provider("p");
    let script = first(answer(429).header("retry-after", 3600));
    let service = retrying(rung(&provider, script.clone()));
    let mut no_deadline = request(1);
    no_deadline.extensions_mut().insert(Task::new(1));
    let start = Instant::now();
    let reply = service.oneshot(no_deadline).await.unwrap();
    assert_eq!((reply.status().as_u16(), start.elapsed()), (429, Duration::ZERO));
}
