<?php
// A text of a few megabytes through PHP's own compression of what it puts out.
ob_start('ob_gzhandler');
header('Content-Type: text/html');
readfile($_SERVER['FOLDER'] . '/text.html');
