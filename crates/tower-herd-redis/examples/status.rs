//! The state of a fleet, as its store has it:
//!
//! ```text
//! cargo run -p tower-herd-redis --example status -- --redis redis://127.0.0.1/ openai anthropic
//! ```
//!
//! `--cluster` takes the address for one node of a cluster, `--sentinel NAME` for a sentinel of the primary NAME;
//! `--watch` looks again every second. The password comes from `REDIS_PASSWORD`, the user from `REDIS_USER`.

use clap::Parser;
use std::{error::Error, time::Duration};
use tower_herd_redis::{RedisConfig, RedisStore, Scope, Status};

/// Prints the state of a fleet.
#[derive(Debug, Parser)]
struct Options {
    /// The store: redis://, rediss:// (feature `tls`) or unix://
    #[arg(long, default_value = "redis://127.0.0.1/")]
    redis: String,
    /// The address is one node of a cluster.
    #[arg(long, conflicts_with = "sentinel")]
    cluster: bool,
    /// The address is a sentinel, of this primary.
    #[arg(long, value_name = "NAME")]
    sentinel: Option<String>,
    /// What the fleet's keys begin with.
    #[arg(long, default_value = "herd")]
    prefix: String,
    /// Looks again every second.
    #[arg(long)]
    watch: bool,
    /// Providers, by name.
    #[arg(required = true)]
    providers: Vec<String>,
}

#[tokio::main(flavor = "current_thread")]
async fn main() -> Result<(), Box<dyn Error>> {
    let options = Options::parse();
    let url = options.redis.as_str();
    let mut config = match &options.sentinel {
        Some(name) => RedisConfig::sentinel(name, [url])?,
        None if options.cluster => RedisConfig::cluster([url])?,
        None => RedisConfig::single(url)?,
    };
    if let Ok(password) = std::env::var("REDIS_PASSWORD") {
        config = config.credentials(std::env::var("REDIS_USER").ok().as_deref(), &password);
    }
    let store = RedisStore::new(config.prefix(&options.prefix))?;
    loop {
        for provider in &options.providers {
            match store.peek(provider).await {
                Ok(Some(status)) => print(provider, &status),
                Ok(None) => println!("{provider}: nobody has been here\n"),
                Err(error) if options.watch => println!("{provider}: {error}: {}\n", cause(&error)),
                Err(error) => return Err(format!("{error}: {}", cause(&error)).into()),
            }
        }
        if !options.watch {
            return Ok(());
        }
        tokio::time::sleep(Duration::from_secs(1)).await;
    }
}

fn cause(error: &dyn Error) -> String {
    error.source().map(ToString::to_string).unwrap_or_default()
}

fn seconds(millis: u64) -> String {
    format!("{}.{} s", millis / 1000, millis % 1000 / 100)
}

fn print(provider: &str, status: &Status) {
    let limit = status.limit.map_or("not learned yet".to_owned(), |limit| format!("limit {limit}"));
    println!(
        "{provider}: ceiling {} ({limit}), {} held, {} in flight, {} processes",
        status.ceiling,
        status.charge(),
        status.busy(),
        status.members.iter().filter(|member| !member.lapsed && !member.gone).count(),
    );
    if status.learning > 0 {
        let why = if status.hard { "the book is new" } else { "the store was silent" };
        println!("  {why}: nobody is given more for {}", seconds(status.learning));
    }
    if status.disagree {
        println!("  the processes were configured with different limits; the lowest count");
    }
    if status.run == "none" {
        println!("  the server does not tell its run id: after a failover the ceiling may be exceeded");
    }
    for Scope { scope, pause, open, probe, .. } in &status.scopes {
        let name = scope.as_deref().unwrap_or("all of it");
        if let Some(pause) = pause {
            println!("  {name}: paused for {} ({})", seconds(pause.wait), pause.reason);
        }
        if let Some(open) = open {
            println!(
                "  {name}: breaker open since {}, next probe in {}",
                seconds(open.since),
                seconds(open.probe)
            );
        }
        if let Some(probe) = probe {
            println!("  {name}: a probe of {} is out for {}", probe.holder, seconds(probe.within));
        }
    }
    for rate in &status.rates {
        println!("  {:?}: {} a minute, {} of {} left", rate.of, rate.per_minute, rate.left, rate.burst);
    }
    if !status.members.is_empty() {
        println!(
            "  {:<24} {:>5} {:>5} {:>5} {:>6} {:>5} {:>9}",
            "process", "held", "busy", "need", "target", "safe", "heard"
        );
    }
    for member in &status.members {
        let name = if member.label.is_empty() { member.holder.to_string() } else { member.label.clone() };
        let name: String = name.chars().take(24).collect();
        let note = match (member.pending, member.lapsed, member.gone) {
            (_, true, _) => "  lease run out",
            (_, _, true) => "  has left",
            (true, _, _) => "  not heard since the silence",
            _ => "",
        };
        println!(
            "  {name:<24} {:>5} {:>5} {:>5} {:>6} {:>5} {:>9}{note}",
            member.charge,
            member.busy,
            member.need,
            member.target,
            member.safe,
            seconds(member.heard),
        );
    }
    println!();
}
