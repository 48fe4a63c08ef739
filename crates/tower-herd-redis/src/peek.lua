-- The whole book of one provider, for people: reads only.
--
--   KEYS[1]  the provider's hash, as lease.lua writes it
--
-- Returns JSON: null without a book, else what is in it. `now` is the book's own clock, which all other instants
-- in it are to be read against; what is still to come is told as a wait, in milliseconds.

local state = redis.call('HGET', KEYS[1], 's')
if not state then return 'null' end
local s = cmsgpack.unpack(state)

-- The book's clock stands still between two exchanges.
local time = redis.call('TIME')
local now = s.now + math.max(0, time[1] * 1000 + math.floor(time[2] / 1000) - s.clock)

local function wait(instant)
  return math.max(0, instant - now)
end

local members = {}
local raw = redis.call('HGETALL', KEYS[1])
for i = 1, #raw, 2 do
  if raw[i] ~= 's' then
    local r = cmsgpack.unpack(raw[i + 1])
    members[#members + 1] = {
      holder = raw[i], seq = r[1], version = r[2], charge = r[3], need = r[4], headroom = r[5], busy = r[6],
      weight = r[7], safe = r[8], target = r[10], heard = now - r[12], left = wait(r[13]), pending = r[15],
      lapsed = r[16], gone = r[17], label = r[21],
    }
  end
end
table.sort(members, function(a, b) return a.holder < b.holder end)

local scopes = {}
for i, scope in ipairs(s.scopes) do
  local pause, open, probe = scope.pause, scope.open, scope.probe
  scopes[i] = {
    scope = scope.name ~= '' and scope.name or nil,
    generation = scope.generation,
    pause = pause and now < pause['until'] and { wait = wait(pause['until']), reason = pause.reason } or nil,
    open = open and { wait = wait(open['until']), since = now - open.since, probe = wait(open.probe_at),
      by = open.by } or nil,
    probe = probe and now < probe['until'] and { holder = probe.holder, within = wait(probe['until']) } or nil,
    calls = scope.calls,
    throttled = scope.throttled,
  }
end

local rates = {}
for i, b in ipairs(s.rates) do
  if b then
    rates[#rates + 1] = { of = i == 1 and 'requests' or 'tokens', per_minute = b.per_minute, burst = b.burst,
      left = math.floor(math.min(b.level + b.per_minute * (now - b.at), b.burst * 60000) / 60000) }
  end
end

local control = s.control
return cjson.encode({
  epoch = s.epoch,
  run = s.run,
  now = now,
  silent = now - s.now,
  learning = wait(s.learn_until),
  hard = s.hard,
  ceiling = control.last,
  limit = control.limit or nil,
  configured = control.configured or nil,
  generation = control.generation,
  disagree = s.merged[9] or false,
  -- An empty table would be written as an object.
  members = #members > 0 and members or nil,
  scopes = #scopes > 0 and scopes or nil,
  rates = #rates > 0 and rates or nil,
})
