-- For `python -m bench script`: what ?w=W&h=H&g=1&q=Q does, where t is test_WxH_Q.
function f()
    local w, h, q = string.match(zimg.type(), "^test_(%d+)x(%d+)_(%d+)$")
    w, h, q = tonumber(w), tonumber(h), tonumber(q)
    local cols, rows = zimg.cols(), zimg.rows()
    local part, whole = h, rows
    if w * rows > h * cols then
        part, whole = w, cols
    end
    local width = math.floor((2 * cols * part + whole) / (2 * whole))
    local height = math.floor((2 * rows * part + whole) / (2 * whole))
    if zimg.scale(width, height) ~= 1
        or zimg.crop(math.floor((width - w) / 2), math.floor((height - h) / 2), w, h) ~= 1
        or zimg.gray() ~= 1 or zimg.set_quality(q) ~= 1 or zimg.set_format("JPEG") ~= 1 then
        return zimg.ret(-1)
    end
    return zimg.ret(1)
end
