local report = cjson.decode(ARGV[1])
local before = tonumber(redis.call('HGET', KEYS[1], 'h:' .. report.holder) or 0)
local stale = report.seq <= before
if not stale then redis.call('HSET', KEYS[1], 'h:' .. report.holder, report.seq) end
for _, news in ipairs(report.news or {}) do
  if news.what == 'paused' then redis.pcall(ARGV[4], ARGV[2], '*') end
end
return cjson.encode({epoch = '0000000000000001', version = 1, slots = 1, safe = 0, target = 1, contended = false, turns = false,
  stale = stale, before = before, learning = 0, members = 1, weights = 1, ceiling = 1, generation = 1, disagree = false})
